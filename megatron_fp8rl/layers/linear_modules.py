"""The linear layers of a Megatron-Core GPT, under the global names that pins and rollout use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from fp8rl import PinPolicy
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.training.layout import (
    REPLICATED,
    ROW_PARALLEL,
    RowLayout,
    delta_net_layout,
    gate_up_layout,
    plain_layout,
    qkv_layout,
)
from megatron_fp8rl import compat
from megatron_fp8rl.hf_names import STEM, WRAPPED_STEM, joint_name, shared_expert_name

_EXPERT = re.compile(r"\.experts\.\d+\.")
_LATENT = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "linear_kv_up_proj": "kv_b_proj",
}
"""HF leaf of each linear of multi-latent attention; rows are in HF's order."""


@dataclass(frozen=True)
class Site:
    """One linear module of this rank; a grouped one holds the weights of several experts."""

    names: tuple[str, ...]
    """Global HF module name of each weight, fused parts under the fused name."""
    path: str
    """Path of the module in its model chunk, for messages."""
    module: Any
    layout: RowLayout
    """Row order of each weight."""
    other: str = ""
    """Global HF name of the module whose rows lie behind those of the layout, in BF16 always."""
    other_rows: int = 0
    """Number of these rows."""

    @property
    def name(self) -> str:
        """The module's name; that of a grouped module leaves out the numbers of its experts."""
        return _EXPERT.sub(".experts.", self.names[0]) if self.grouped else self.names[0]

    @property
    def sharded(self) -> dict[str, int]:
        """Rows or columns of each matrix along the dimension that tensor parallel cuts; a HF tensor
        may be several."""
        (leaf, *others) = self.layout.parts
        if leaf in REPLICATED and _is_whole(self.module):
            return {}
        if not others and leaf in ROW_PARALLEL:
            return {leaf: self.weights[0].shape[1]}
        return self.layout.section_rows

    @property
    def grouped(self) -> bool:
        return hasattr(self.module, "num_gemms")

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return weights_of(self.module)

    def runs_in_fp8(self, policy: PinPolicy) -> bool:
        """Tell whether the pins leave the module in FP8.

        Raises:
            PinError: they pin only some experts of a grouped module, or put rows in FP8 that are
                in BF16 always.
        """
        if self.other and policy.precision(self.other) == "fp8":
            raise PinError(
                f"pins.fp8 puts '{self.other}' in FP8, whose rows are the last ones of "
                f"'{self.path}' here, without blocks of their own; leave it out of pins.fp8, or "
                "set recipe.training to false."
            )
        precisions = {name: policy.precision(name) for name in self.names}
        if len(set(precisions.values())) > 1:
            odd = next(name for name, precision in precisions.items() if precision == "bf16")
            raise PinError(
                f"pins.{policy.row(odd).reason} pins '{odd}' but not all experts of the grouped "
                f"'{self.path}'; pin all experts of a layer or none."
            )
        return "fp8" in precisions.values()


def _is_whole(linear: Any) -> bool:
    """Tell whether every tensor-parallel rank holds all rows: TransformerEngine's down projections
    are ``duplicated``, local ones are whole at a size of 1."""
    if hasattr(linear, "parallel_mode"):
        return linear.parallel_mode is None
    return linear.output_size == len(linear.weight)


def weights_of(module: Any) -> list[torch.nn.Parameter]:
    """Return the weight of a linear module, or the weights of a grouped one in order."""
    if hasattr(module, "num_gemms"):
        return [getattr(module, f"weight{i}") for i in range(module.num_gemms)]
    return [module.weight]


def sites(roots: Iterable[torch.nn.Module], *, wrapped: bool = False) -> list[Site]:
    """List the linear modules of all transformer layers in model chunks (or of one layer).

    Raises:
        UnsupportedError: a layer has a matrix without a known HF name, or is there twice.
    """
    found: dict[str, Site] = {}
    for site in (site for root in roots for site in _in_chunk(root, wrapped)):
        if found.setdefault(site.name, site) is not site:
            raise UnsupportedError(
                f"The model chunks hold '{site.name}' twice; give each chunk of one model once, "
                "and another model by itself."
            )
    return list(found.values())


def _in_chunk(chunk: torch.nn.Module, wrapped: bool) -> Iterator[Site]:
    mtp = {
        id(compat.mtp_transformer_layer(module)): (path, module)
        for path, module in chunk.named_modules()
        if isinstance(module, MultiTokenPredictionLayer)
    }
    for path, layer in chunk.named_modules():
        if not isinstance(layer, TransformerLayer):
            continue
        prefix = layer_name(layer, wrapped=wrapped)
        found = list(_in_layer(layer, path, prefix))
        _check_all_known(layer, path, found)
        yield from found
        if id(layer) in mtp:
            mtp_path, parent = mtp[id(layer)]
            name = joint_name(layer.config, prefix)
            yield _plain(parent.eh_proj, name, f"{mtp_path}.eh_proj")


def layer_name(layer: Any, *, wrapped: bool = False) -> str:
    """Return ``model.layers.N`` (inside a wrapper with its prefix) or ``mtp.layers.N``.

    ``layer_number`` is global under pipeline and virtual pipeline, where the number in the path is
    local. Megatron up to 0.16 numbers MTP layers after those of the decoder; later versions flag
    them and count from 1 again (transformer/multi_token_prediction.py).
    """
    number: int = layer.layer_number - 1
    decoder: int = layer.config.num_layers
    if number >= decoder:
        return f"mtp.layers.{number - decoder}"
    stack = WRAPPED_STEM if wrapped else STEM
    return f"{'mtp.' if getattr(layer, 'is_mtp_layer', False) else stack}layers.{number}"


def _in_layer(layer: Any, path: str, prefix: str) -> Iterator[Site]:
    at = f"{path}." if path else ""
    attention: Any
    mlp: Any
    attention, mlp = getattr(layer, "self_attention", None), getattr(layer, "mlp", None)
    qkv, proj = getattr(attention, "linear_qkv", None), getattr(attention, "linear_proj", None)
    if _has_weight(qkv):  # a layer may go without
        where = f"{at}self_attention.linear_qkv"
        yield Site((f"{prefix}.self_attn.qkv_proj",), where, qkv, _qkv_layout(attention, where))
    for attribute, leaf in _LATENT.items():
        linear = getattr(attention, attribute, None)
        if _has_weight(linear):
            where = f"{at}self_attention.{attribute}"
            _check_no_query_norm(linear, leaf, where)
            yield _plain(linear, f"{prefix}.self_attn.{leaf}", where)
    if _has_weight(proj):
        yield _plain(proj, f"{prefix}.self_attn.o_proj", f"{at}self_attention.linear_proj")
    if _has_weight(getattr(attention, "in_proj", None)):  # a gated delta net
        yield from _delta_net(attention, f"{at}self_attention", f"{prefix}.linear_attn")

    experts: Any = getattr(mlp, "experts", None)
    if experts is None:
        yield from _mlp(mlp, f"{at}mlp", [f"{prefix}.mlp"])
        return
    where, name = f"{at}mlp.experts", f"{prefix}.mlp.experts"
    names = [f"{name}.{number}" for number in mlp.local_expert_indices]
    if hasattr(experts, "local_experts"):
        for local, expert in enumerate(names):
            each = experts.local_experts[local]
            yield from _mlp(each, f"{where}.local_experts.{local}", [expert], expert=True)
    else:
        _check_grouped(experts, where, len(names))
        yield from _mlp(experts, where, names, expert=True)
    shared = getattr(mlp, "shared_experts", None)
    if shared is not None:
        name = f"{prefix}.mlp.{shared_expert_name(layer.config)}"
        yield from _mlp(shared, f"{at}mlp.shared_experts", [name])


def _delta_net(attention: Any, path: str, name: str) -> Iterator[Site]:
    """Yield the linears of a gated delta net; the rows of ``in_proj_ba`` stay in BF16."""
    key_rows, value_rows = (
        rows // attention.tp_size for rows in (attention.qk_dim, attention.v_dim)
    )
    yield Site(
        (f"{name}.in_proj_qkvz",),
        f"{path}.in_proj",
        attention.in_proj,
        delta_net_layout(key_rows, value_rows),
        other=f"{name}.in_proj_ba",
        other_rows=2 * attention.num_value_heads // attention.tp_size,
    )
    yield _plain(attention.out_proj, f"{name}.out_proj", f"{path}.out_proj")


def _check_no_query_norm(linear: Any, leaf: str, path: str) -> None:
    """Refuse a norm in front of ``q_proj``, which no Hugging Face model has.

    See :func:`megatron_fp8rl.compat.without_query_norm`.
    """
    if leaf == "q_proj" and getattr(linear, "layer_norm_weight", None) is not None:
        raise UnsupportedError(
            f"'{path}' begins with a norm that the Hugging Face model does not have, so the "
            "trainer would be another model than the rollout: Megatron-LM 0.20 adds it where "
            "config.qk_layernorm is on and q_lora_rank is None. Build the model within "
            "megatron_fp8rl.compat.without_query_norm(), or use a Megatron-Bridge that has mended "
            "this (its issue 5261)."
        )


def _mlp(mlp: Any, path: str, names: list[str], *, expert: bool = False) -> Iterator[Site]:
    """Yield the two linears of an MLP, or of all experts under their ``names``."""
    for leaf in ("linear_fc1", "linear_fc2"):
        linear = getattr(mlp, leaf, None)
        if not _has_weight(linear):
            continue
        rows, part = len(weights_of(linear)[0]), "up_proj" if leaf == "linear_fc1" else "down_proj"
        layout = plain_layout(part, rows)
        if leaf == "linear_fc1" and mlp.config.gated_linear_unit:
            part, layout = "gate_up_proj", gate_up_layout(rows // 2, apart=expert)
        yield Site(tuple(f"{name}.{part}" for name in names), f"{path}.{leaf}", linear, layout)


def _check_grouped(experts: Any, path: str, count: int) -> None:
    for leaf in ("linear_fc1", "linear_fc2"):
        linear: Any = getattr(experts, leaf, None)
        if not hasattr(linear, "num_gemms") or not hasattr(linear, "weight0"):
            raise UnsupportedError(
                f"'{path}' is a {type(experts).__name__} without a matrix for each expert, which "
                "FP8 linears do not know; use SequentialMLP (moe_grouped_gemm off) or "
                "TransformerEngine's grouped layers, without moe_use_legacy_grouped_gemm and "
                "without one parameter for all experts."
            )
        if linear.num_gemms != count:
            raise UnsupportedError(
                f"'{path}.{leaf}' has {linear.num_gemms} weights for {count} experts; pin "
                "kind 'experts' to BF16."
            )


def _plain(module: Any, name: str, path: str) -> Site:
    return Site((name,), path, module, plain_layout(name.rpartition(".")[2], len(module.weight)))


def _has_weight(module: Any) -> bool:
    return any(getattr(module, name, None) is not None for name in ("weight", "weight0"))


def _qkv_layout(attention: Any, path: str) -> RowLayout:
    groups = attention.num_query_groups_per_partition
    ranks = attention.world_size
    if attention.config.num_query_groups < ranks:
        raise UnsupportedError(
            f"'{path}' spreads one query group over several ranks "
            f"({attention.config.num_query_groups} groups, TP {ranks}), so its "
            "blocks are not those of the rollout engine; use a TP size of at most the number of "
            "query groups."
        )
    return qkv_layout(
        attention.num_attention_heads_per_partition,
        groups,
        attention.hidden_size_per_attention_head,
        gated=bool(getattr(attention.config, "attention_output_gate", False)),
    )


_KNOWN_BF16 = (
    "mlp.router.weight",
    "mlp.shared_experts.gate_weight",
    "self_attention.conv1d.weight",
)


def _check_all_known(layer: Any, path: str, found: list[Site]) -> None:
    known = {id(weight) for site in found for weight in site.weights}
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known and name not in _KNOWN_BF16:
            owner = layer.get_submodule(name.rpartition(".")[0])
            raise UnsupportedError(
                f"'{path}.{name}' belongs to a {type(owner).__name__}, which is not part of a "
                "self-attention, MLP or MoE layer; cross attention is not served (set "
                "recipe.training to false)."
            )

"""Swap the linear layers of a built GPTModel for FP8 ones, in place."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from fp8rl import PinPolicy, PluginManager, Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.numerics import BLOCK, GROUP, Quantized
from fp8rl.pinning import dense_module_names
from megatron_fp8rl import compat
from megatron_fp8rl.backends import BackendChoice
from megatron_fp8rl.export import ModelChunks, unwrap_chunks
from megatron_fp8rl.layout import RowLayout, gate_up_layout, plain_layout, qkv_layout
from megatron_fp8rl.linear import FP8_CLASSES, Fp8State
from megatron_fp8rl.weight_codes import WeightCodes, WeightEpoch

logger = logging.getLogger(__name__)

_UPSTREAM = {fp8: upstream for upstream, fp8 in FP8_CLASSES.items()}


class Conversion:
    """A converted model; holds what must be undone.

    ``recipe`` and ``policy`` are those it was made with; the policy covers the whole model, the
    modules are this rank's.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: PinPolicy,
        modules: Mapping[str, Any],
        epoch: WeightEpoch | None,
    ) -> None:
        self.recipe = recipe
        self.policy = policy
        self._modules = dict(modules)
        self._epoch = epoch

    @property
    def modules(self) -> Mapping[str, torch.nn.Module]:
        """FP8 modules of this rank by global HF name, e.g. ``model.layers.0.mlp.down_proj``."""
        return MappingProxyType(self._modules)

    def invalidate(self) -> None:
        """Quantize every weight anew at its next use.

        Needed after weights were written through ``parameter.data``, which leaves no trace;
        optimizer steps, ``load_state_dict`` and in-place operations are noticed.
        """
        if self._epoch is not None:
            self._epoch.turn()

    def drop_codes(self) -> None:
        """Free the codes of all weights (1 byte a parameter), e.g. before offloading."""
        for module in self._modules.values():
            module.fp8_state.codes.drop()

    def close(self) -> None:
        """Give the modules their upstream classes back; may be called again."""
        for module in self._modules.values():
            module.__class__ = _UPSTREAM[type(module)]
            del module.fp8_state
        self._modules.clear()
        if self._epoch is not None:
            self._epoch.close()


def convert(
    model: ModelChunks,
    recipe: Recipe,
    *,
    plugins: PluginManager | None = None,
    gemm_backend: str | None = None,
) -> Conversion:
    """Let the linear layers that the recipe does not pin run in FP8.

    Parameters, their names, shapes, hooks and ``sharded_state_dict`` keys stay as they are; a
    pinned module keeps its exact class. Works before or after the model is wrapped in
    Float16Module and DDP, and before or after its optimizer is made.

    Args:
        model: a GPTModel, whatever wraps it, or the list of a rank's virtual-pipeline chunks.
        recipe: what runs in FP8; with ``training=False`` nothing is converted.
        plugins: where pins and GEMM backends come from; the installed plugins by default.
        gemm_backend: name of the backend; by default the first that serves every product.

    Raises:
        PinError: a pin matches nothing.
        PluginError: two plugins offer a GEMM backend of one name.
        UnsupportedError: a module, config option or model that FP8 linears do not serve, or that
            is converted already. Nothing has been changed then.
    """
    plugins = PluginManager() if plugins is None else plugins
    chunks = unwrap_chunks(model)
    config = chunks[0].config
    policy = plugins.pin_policy(recipe.pins, _module_names(config))
    if not recipe.training:
        return Conversion(recipe, policy, {}, None)

    compat.check_forward_impl()
    _check_config(config)
    backends = BackendChoice(
        plugins.gemm_backends(),
        (recipe.weights.scale_format, recipe.activations.scale_format),
        gemm_backend,
    )
    plan = [item for chunk in chunks for item in _plan(chunk, policy)]
    for item in plan:
        item.check(backends)

    epoch = WeightEpoch()
    for item in plan:
        codes = WeightCodes(item.layout, recipe.weights.scale_format, epoch)
        item.module.fp8_state = Fp8State(
            item.name, codes, backends, recipe.activations.scale_format
        )
        item.module.__class__ = FP8_CLASSES[type(item.module)]
    _log(policy, plan, backends)
    return Conversion(recipe, policy, {item.name: item.module for item in plan}, epoch)


def weight_codes_hf(module: Any) -> dict[str, Quantized]:
    """Codes of a converted module's weight as the rollout engine has them.

    They are the ones that the next forward uses, so under DDP's ``overlap_param_gather`` the
    parameters must have been gathered before.

    Returns:
        By global HF module name, this rank's rows (or columns) of each HF tensor on its own grid:
        ``quantize_block`` of the exported shard gives the same. Where a fused module's parts do
        not start on block boundaries, one entry under the fused name (``..qkv_proj``): the grid of
        the rank's ``[q; k; v]`` or ``[gate; up]``.

    Raises:
        UnsupportedError: the module was not converted.
    """
    state = getattr(module, "fp8_state", None)
    if not isinstance(state, Fp8State):
        raise UnsupportedError(
            f"{type(module).__name__} has no FP8 codes; pass a module of Conversion.modules."
        )
    layout, codes = state.codes.layout, state.codes.get(module.weight)
    if layout.in_place:
        codes = layout.codes_to_hf(codes)
    if not layout.aligned:
        return {state.name: codes}
    prefix = state.name.rpartition(".")[0]
    return {f"{prefix}.{part}": piece for part, piece in layout.split_codes(codes).items()}


@dataclass(frozen=True)
class _Linear:
    """One linear layer of this rank."""

    name: str
    path: str
    module: Any
    layout: RowLayout
    sharded: Mapping[str, int]
    """Rows or columns of each HF tensor along the dimension that tensor parallel cuts."""

    def check(self, backends: BackendChoice) -> None:
        if type(self.module) in _UPSTREAM:
            raise UnsupportedError(
                f"'{self.path}' runs in FP8 already; close() the first Conversion before "
                "converting again."
            )
        if type(self.module) not in FP8_CLASSES:
            raise UnsupportedError(
                f"'{self.path}' is a {type(self.module).__name__}; FP8 linears replace "
                "ColumnParallelLinear and RowParallelLinear alone (build the model from the local "
                "layer spec, or pin the module to BF16)."
            )
        out_features, in_features = self.module.weight.shape
        if out_features != self.layout.rows:
            raise UnsupportedError(
                f"'{self.path}' has {out_features} rows where its config says {self.layout.rows}; "
                "pin it to BF16."
            )
        shape = GemmShape(GROUP, out_features, in_features)
        backends.pick(self.module.weight.device, shape, self.name)


def _module_names(config: Any) -> list[str]:
    names = dense_module_names(config.num_layers)
    if config.gated_linear_unit:
        return names
    return [name for name in names if not name.endswith(".gate_proj")]


def _check_config(config: Any) -> None:
    refused = {
        "fp8": "megatron's own FP8 would quantize the same layers",
        "fp4": "megatron's own FP4 would quantize the same layers",
        "enable_autocast": "FP8 linears have no autocast rule",
        "delay_wgrad_compute": "FP8 linears compute weight gradients at once",
        "attention_output_gate": "the HF layout of a gated linear_qkv is not known",
        "multi_latent_attention": "multi-latent attention is not served yet",
        "mtp_num_layers": "multi-token prediction layers are not served yet",
    }
    for option, reason in refused.items():
        if getattr(config, option, None):
            raise UnsupportedError(
                f"config.{option}={getattr(config, option)!r}: {reason}; switch it off, or set "
                "recipe.training to false."
            )


def _plan(chunk: torch.nn.Module, policy: PinPolicy) -> Iterator[_Linear]:
    for path, layer in chunk.named_modules():
        if isinstance(layer, TransformerLayer):
            linears = list(_linears(layer, path))
            _check_all_known(layer, path, linears)
            yield from (item for item in linears if policy.precision(item.name) == "fp8")


def _linears(layer: Any, path: str) -> Iterator[_Linear]:
    inner = dict(layer.named_modules())
    fc1 = "mlp.gate_up_proj" if layer.config.gated_linear_unit else "mlp.up_proj"
    for where, leaf in (
        ("self_attention.linear_qkv", "self_attn.qkv_proj"),
        ("self_attention.linear_proj", "self_attn.o_proj"),
        ("mlp.linear_fc1", fc1),
        ("mlp.linear_fc2", "mlp.down_proj"),
    ):
        module: Any = inner.get(where)
        if getattr(module, "weight", None) is None:  # a layer may go without
            continue
        # layer_number is global under pipeline and virtual pipeline; the path's number is local.
        name = f"model.layers.{layer.layer_number - 1}.{leaf}"
        full_path = f"{path}.{where}"
        part = leaf.rpartition(".")[2]
        if where.endswith("linear_qkv"):
            layout = _qkv_layout(layer.self_attention, full_path)
        elif part == "gate_up_proj":
            layout = gate_up_layout(module.weight.shape[0] // 2)
        else:
            layout = plain_layout(part, module.weight.shape[0])
        row_parallel = part in ("o_proj", "down_proj")
        sharded = {part: module.weight.shape[1]} if row_parallel else layout.part_rows
        yield _Linear(name, full_path, module, layout, sharded)


def _qkv_layout(attention: Any, path: str) -> RowLayout:
    groups = attention.num_query_groups_per_partition
    if attention.config.num_query_groups < attention.world_size:
        raise UnsupportedError(
            f"'{path}' spreads one query group over several ranks "
            f"({attention.config.num_query_groups} groups, TP {attention.world_size}), so its "
            "blocks are not those of the rollout engine; use a TP size of at most the number of "
            "query groups."
        )
    return qkv_layout(
        attention.num_attention_heads_per_partition,
        groups,
        attention.hidden_size_per_attention_head,
    )


def _check_all_known(layer: Any, path: str, linears: list[_Linear]) -> None:
    known = {id(item.module.weight) for item in linears}
    for name, parameter in layer.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in known:
            owner = layer.get_submodule(name.rpartition(".")[0])
            raise UnsupportedError(
                f"'{path}.{name}' belongs to a {type(owner).__name__}, which is not part of a "
                "dense attention or MLP layer; mixture-of-experts, cross attention and latent "
                "attention are not served yet (set recipe.training to false)."
            )


def _log(policy: PinPolicy, plan: list[_Linear], backends: BackendChoice) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    rows = "\n".join(
        f"  {row.name}: {row.precision}{f' ({row.reason})' if row.reason else ''}"
        for row in policy.report()
    )
    names = ", ".join(backends.names)
    logger.info("[rank %d] %s; GEMM backends: %s\n%s", rank, policy.summary(), names, rows)
    ragged = {
        item.name: [f"{part} {width}" for part, width in item.sharded.items() if width % BLOCK[0]]
        for item in plan
    }
    listed = "; ".join(f"{name} ({', '.join(parts)})" for name, parts in ragged.items() if parts)
    if listed:
        logger.warning(
            "[rank %d] widths on this rank that are no multiple of %d make FP8 codes depend on the "
            "tensor-parallel size: %s. Use one TP size for trainer and rollout, or pin these "
            "modules to BF16.",
            rank,
            BLOCK[0],
            listed,
        )

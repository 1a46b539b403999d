"""Hugging Face names in and out of a Megatron-Core GPT.

Serves Llama, Qwen2, Qwen3 and Qwen3-MoE-style models: RMSNorm, gated MLP or a mixture of such
experts (sequential or grouped, with or without a shared one), optional QK norm, optional biases,
tied or untied embeddings, any tensor/pipeline/virtual-pipeline/expert split, local or Transformer
Engine layer spec. Megatron fuses q, k and v row by row of query groups
(``[group0: its queries, k, v; group1: ...]``, ``SelfAttention.get_query_key_value_tensors`` in
``megatron/core/transformer/attention.py``), and gate and up per tensor-parallel shard
(``[gate_shard; up_shard]``, ``megatron/core/transformer/mlp.py``).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor

from fp8rl import PinPolicy
from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.numerics import BLOCK, mark_inf, quantize_block
from fp8rl.pinning import FUSED, kind_of
from fp8rl.recipe import ScaleFormat
from megatron_fp8rl.layout import RowLayout, gate_up_layout, qkv_layout, shared_expert_name

logger = logging.getLogger(__name__)

ModelChunks = torch.nn.Module | Sequence[torch.nn.Module]


@dataclass(frozen=True)
class _Rule:
    """How one Megatron parameter is made of Hugging Face tensors."""

    names: tuple[str, ...]
    packing: Literal["plain", "qkv", "glu"] = "plain"
    tp_dim: int | None = None
    """Dimension that tensor parallelism cuts; None where every rank holds all of it."""
    width: str = "ffn_hidden_size"
    """Config field with the rows of gate, for a glu."""
    expert: bool = False
    """One of many, spread over the expert-parallel group; ``{}`` in a name is its number."""


def _qkv(leaf: str) -> _Rule:
    return _Rule(tuple(f"self_attn.{p}_proj.{leaf}" for p in "qkv"), "qkv", tp_dim=0)


def _glu(leaf: str, block: str = "mlp", width: str = "ffn_hidden_size", **more: Any) -> _Rule:
    names = (f"{block}.gate_proj.{leaf}", f"{block}.up_proj.{leaf}")
    return _Rule(names, "glu", tp_dim=0, width=width, **more)


def _expert_rules(block: str, width: str, **more: Any) -> dict[str, _Rule]:
    return {
        "linear_fc1.weight": _glu("weight", block, width, **more),
        "linear_fc2.weight": _Rule((f"{block}.down_proj.weight",), tp_dim=1, **more),
    }


_EXPERTS = _expert_rules("mlp.experts.{}", "moe_ffn_hidden_size", expert=True)
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


_INPUT_NORM = _Rule(("input_layernorm.weight",))
_MLP_NORM = _Rule(("post_attention_layernorm.weight",))
# In the order of the stream. Transformer Engine fuses a norm into the linear layer behind it.
_LAYER_RULES: Mapping[str, _Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": _Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": _Rule(("self_attn.o_proj.weight",), tp_dim=1),
    "self_attention.linear_proj.bias": _Rule(("self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": _glu("weight"),
    "mlp.linear_fc1.bias": _glu("bias"),
    "mlp.linear_fc2.weight": _Rule(("mlp.down_proj.weight",), tp_dim=1),
    "mlp.linear_fc2.bias": _Rule(("mlp.down_proj.bias",)),
    "mlp.router.weight": _Rule(("mlp.gate.weight",)),
    **{f"mlp.experts.{leaf}": rule for leaf, rule in _EXPERTS.items()},
    "mlp.shared_experts.gate_weight": _Rule(("mlp.shared_expert_gate.weight",)),
    **{
        f"mlp.shared_experts.{leaf}": rule
        for leaf, rule in _expert_rules("mlp.{}", _SHARED_WIDTH).items()
    },
}
_EMBEDDING = _Rule(("model.embed_tokens.weight",), tp_dim=0)
_FINAL_NORM = _Rule(("model.norm.weight",))
_HEAD = _Rule(("lm_head.weight",), tp_dim=0)
_OUTER_RULES: Mapping[str, _Rule] = {
    "embedding.word_embeddings.weight": _EMBEDDING,
    "decoder.final_layernorm.weight": _FINAL_NORM,
    "output_layer.weight": _HEAD,
}
_IN_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
# Of one local expert: a module of its own, or the weights of a grouped one.
_SEQUENTIAL = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


@dataclass(frozen=True)
class _Entry:
    """Place in the stream of one Megatron parameter; the same on every rank."""

    order: tuple[int, int, int, int]
    """(-1 embedding, else global layer, num_layers after the stack; block within it; expert, else
    0; position)."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    expert: int | None = None


@dataclass(frozen=True)
class _Slot:
    """A parameter of this rank and the rule that maps it."""

    entry: _Entry
    rule: _Rule
    param: torch.nn.Parameter
    exported: bool
    """False for the last stage's copy of a tied embedding."""


class _Layout:
    """Shapes and groups of one model, read from its config."""

    def __init__(self, chunks: Sequence[GPTModel], vocab_size: int | None) -> None:
        model = chunks[0]
        self.config = model.config
        self.num_layers: int = model.config.num_layers
        self.tp = model.pg_collection.tp
        self.pp = model.pg_collection.pp
        self.ep = model.pg_collection.ep
        self.expert_tp = model.pg_collection.expt_tp
        self.tied = bool(model.share_embeddings_and_output_weights)
        self.vocab_size = model.vocab_size if vocab_size is None else vocab_size
        if not 0 < self.vocab_size <= model.vocab_size:
            raise CheckpointError(
                f"vocab_size={vocab_size} is not within the model's {model.vocab_size} (padded) "
                "vocabulary rows; give the size of the Hugging Face vocabulary."
            )
        self.device = next(p.device for chunk in chunks for p in chunk.parameters())

    def rows(self, rule: _Rule) -> RowLayout | None:
        """Row order of the whole parameter of a packed rule; None where it is one tensor."""
        config = self.config
        if rule.packing == "qkv":
            return qkv_layout(
                config.num_attention_heads, config.num_query_groups, config.kv_channels
            )
        return gate_up_layout(getattr(config, rule.width)) if rule.packing == "glu" else None

    def tp_of(self, rule: _Rule) -> Any:
        """The group that the parameters of a rule are cut over."""
        return self.expert_tp if rule.expert else self.tp

    def hf_shapes(self, rule: _Rule, param: Tensor, where: str) -> tuple[tuple[int, ...], ...]:
        full = list(param.shape)
        if rule.tp_dim is not None:
            full[rule.tp_dim] *= self.tp_of(rule).size()
        if rule in (_EMBEDDING, _HEAD):
            full[0] = self.vocab_size
        rows = self.rows(rule)
        if rows is None:
            return (tuple(full),)
        if rows.rows != full[0]:
            raise UnsupportedError(
                f"Parameter '{where}' has {full[0]} rows over all tensor-parallel ranks where the "
                f"model's config gives {rows.rows}; this layout is not served."
            )
        return tuple((size, *full[1:]) for size in rows.part_rows.values())

    def unpack(self, rule: _Rule, param: Tensor) -> list[Tensor]:
        """The Hugging Face tensors of one parameter, gathered over the tensor-parallel group."""
        shards = [param.detach()]
        group = self.tp_of(rule)
        if rule.tp_dim is not None and group.size() > 1:
            local = param.detach().contiguous()
            shards = [torch.empty_like(local) for _ in range(group.size())]
            torch.distributed.all_gather(shards, local, group=group)
        if rule.packing == "glu":
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[i] for half in halves]) for i in range(2)]
        # torch.cat copies even a single tensor: the stream never shares memory with the model.
        full = torch.cat(shards, rule.tp_dim or 0)
        rows = self.rows(rule)
        if rows is not None:
            return list(rows.to_hf(full).split(list(rows.part_rows.values())))
        return [full[: self.vocab_size].clone()] if rule in (_EMBEDDING, _HEAD) else [full]

    def pack(self, rule: _Rule, tensors: Sequence[Tensor], rows: int) -> Tensor:
        """This rank's shard of the parameter that the Hugging Face tensors make up."""
        size, rank = self.tp_of(rule).size(), self.tp_of(rule).rank()
        if rule.packing == "glu":
            return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
        layout = self.rows(rule)
        full = layout.from_hf(torch.cat(list(tensors))) if layout is not None else tensors[0]
        if rule in (_EMBEDDING, _HEAD) and full.shape[0] < rows * size:
            padding = full.new_zeros(rows * size - full.shape[0], *full.shape[1:])
            full = torch.cat([full, padding])
        return full if rule.tp_dim is None else full.chunk(size, rule.tp_dim)[rank]


def export_hf(
    model_chunks: ModelChunks, *, vocab_size: int | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Stream a model as Hugging Face tensors, embedding first, then layer by global layer.

    Collective: every rank calls it and must consume the whole stream, because each tensor is
    gathered over the tensor-parallel group and broadcast over the pipeline group when its turn
    comes. Every rank gets every tensor. At most one Megatron parameter is gathered at a time.
    Parameters of a DistributedDataParallel that gathers late (``overlap_param_gather``) are
    gathered at the call.

    Args:
        model_chunks: a GPTModel, plain or wrapped (Float16Module, DistributedDataParallel), or the
            list of this rank's virtual-pipeline chunks.
        vocab_size: rows of the Hugging Face vocabulary where the model's is padded; the padding
            rows are left out.

    Returns:
        Pairs of name and tensor, in the dtype of the parameters, on the model's device. The
        tensors are copies. ``lm_head.weight`` is left out where embeddings are tied.

    Raises:
        UnsupportedError: at the call, for a model that is not a Llama/Qwen-style GPT.
        CheckpointError: at the call, for a bad ``vocab_size`` or missing chunks.
    """
    layout, slots = _read_model(model_chunks, vocab_size)
    _gather_late_parameters(model_chunks)
    stream = _whole_stream(layout, slots)
    return _stream(layout, {slot.entry.order: slot for slot in slots if slot.exported}, stream)


def _gather_late_parameters(model_chunks: ModelChunks) -> None:
    """With ``overlap_param_gather`` each rank has only its own share of the new weights between an
    optimizer step and the next forward."""
    for chunk in _as_list(model_chunks):
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _stream(
    layout: _Layout,
    mine: Mapping[tuple[int, int, int, int], _Slot],
    entries: Sequence[tuple[int, _Entry]],
) -> Iterator[tuple[str, Tensor]]:
    for owner, entry in entries:
        slot = mine.get(entry.order)
        tensors = layout.unpack(slot.rule, slot.param) if slot is not None else None
        for index, name in enumerate(entry.names):
            if tensors is not None:
                tensor = tensors[index]
            else:
                tensor = torch.empty(entry.shapes[index], dtype=entry.dtype, device=layout.device)
            # An expert goes to the other experts' ranks of its stage, then to the other stages.
            if entry.expert is not None and layout.ep.size() > 1 and layout.pp.rank() == owner:
                holder = entry.expert // (layout.config.num_moe_experts // layout.ep.size())
                _broadcast(tensor, holder, layout.ep)
            _broadcast(tensor, owner, layout.pp)
            yield name, tensor


def _broadcast(tensor: Tensor, rank_in_group: int, group: Any) -> None:
    if group.size() > 1:
        source = torch.distributed.get_global_rank(group, rank_in_group)
        torch.distributed.broadcast(tensor, src=source, group=group)


def fp8_wire(
    stream: Iterable[tuple[str, Tensor]],
    policy: PinPolicy,
    scale_format: ScaleFormat = "fp32",
    *,
    tensor_parallel_size: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """Put FP8 codes on the wire instead of the weights that run in FP8.

    Half the bytes for a receiver that takes codes as they are. On the wire blocks lie on each whole
    Hugging Face matrix, in the rollout on its rank's ``[q; k; v]`` and ``[gate; up]`` and on its
    columns of ``o_proj`` and ``down_proj``. Where these blocks are not the same (a matrix, or a
    rank's share of it, is no multiple of 128) the rollout would have to quantize codes a second
    time, which changes values; such a weight travels as it came, and is quantized once. A warning
    at the end of the stream names them. A receiver that quantizes whatever arrives (NeMo RL's)
    needs the plain stream.

    Args:
        stream: what :func:`export_hf` gives.
        policy: of the whole model, ``Conversion.policy`` or the same pins.
        scale_format: of the 128x128 blocks.
        tensor_parallel_size: of the rollout engine.

    Returns:
        ``X.weight`` (float8_e4m3fn) and ``X.weight_scale_inv`` (float32) for FP8 modules, one
        after the other, the codes that the rollout would make of the weight (an infinity becomes a
        NaN code); everything else as it came.

    Raises:
        PinError: while streaming, for a matrix that the policy does not know.
        UnsupportedError: while streaming, for experts that come stacked in one tensor, or no such
            ``tensor_parallel_size``.
    """
    if type(tensor_parallel_size) is not int or tensor_parallel_size < 1:
        raise UnsupportedError(
            f"tensor_parallel_size={tensor_parallel_size!r}: give the number of GPUs of a rollout "
            "engine, 1 or more."
        )
    as_they_came: dict[str, int] = {}
    for name, tensor in stream:
        module, _, leaf = name.rpartition(".")
        if tensor.ndim > 2 and kind_of(name) == "experts":
            raise UnsupportedError(
                f"'{name}' stacks the experts of a layer {tuple(tensor.shape)}, which have no FP8 "
                "wire format; export one matrix for each expert, or export BF16."
            )
        if leaf != "weight" or tensor.ndim != 2 or policy.precision(module) != "fp8":
            yield name, tensor
        elif not _has_blocks_of_its_own(module, tensor.shape, tensor_parallel_size):
            kind = re.sub(r"\.\d+\.", ".*.", module)
            as_they_came[kind] = as_they_came.get(kind, 0) + 1
            yield name, tensor
        else:
            codes, scale_inv = quantize_block(mark_inf(tensor), scale_format=scale_format)
            yield name, codes
            yield f"{name}_scale_inv", scale_inv
    if as_they_came:
        logger.warning(
            "fp8_wire sent %d weights without codes, because their rows or columns on a rollout "
            "rank (tensor_parallel_size=%d) are no multiple of 128: %s",
            sum(as_they_came.values()),
            tensor_parallel_size,
            ", ".join(f"{kind} ({count})" for kind, count in as_they_came.items()),
        )


_ROW_PARALLEL = ("o_proj", "down_proj")
_FUSED_PARTS = tuple(part for parts in FUSED.values() for part in parts)


def _has_blocks_of_its_own(module: str, shape: torch.Size, ranks: int) -> bool:
    """Whether each rank of the rollout has whole blocks of a matrix, which no other matrix shares.

    Of a module that is not known here, either dimension may be the one that is cut.
    """
    rows, columns = (size % (block * ranks) == 0 for size, block in zip(shape, BLOCK, strict=True))
    leaf = module.rpartition(".")[2]
    alone = ranks == 1  # and nothing beside it, where the rollout fuses none or has experts
    if leaf in _ROW_PARALLEL:
        return alone or columns
    if leaf in _FUSED_PARTS:
        return rows or (alone and kind_of(module) == "experts")
    return alone or (rows and columns)


def load_hf(
    model_chunks: ModelChunks,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    vocab_size: int | None = None,
    allow_cast: bool = False,
) -> None:
    """Load Hugging Face tensors into a model: the inverse of :func:`export_hf`.

    Collective over the pipeline group: every rank calls it with all tensors of the model and takes
    its own part. An optimizer that exists already keeps its float32 masters until its
    ``reload_model_params()`` is called.

    Args:
        model_chunks: as in :func:`export_hf`.
        tensors: name -> tensor. A lazy mapping is read twice, an iterable is kept in memory.
            ``lm_head.weight`` may be present for tied embeddings if it equals them.
        vocab_size: rows of the Hugging Face vocabulary where the model's is padded; the padding
            rows are set to zero.
        allow_cast: permit a dtype that loses precision, such as float32 into bfloat16.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice, wrongly shaped or of a dtype
            that would lose precision. Nothing has been changed then.
        UnsupportedError: the model is not a Llama/Qwen-style GPT.
    """
    layout, slots = _read_model(model_chunks, vocab_size)
    given = tensors if isinstance(tensors, Mapping) else _collect(tensors)
    expected = {
        name: (shape, entry.dtype)
        for _, entry in _whole_stream(layout, slots)
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    _check_names(given, expected, optional=_HEAD.names if layout.tied else ())
    for name, (shape, dtype) in expected.items():
        _check_tensor(name, given[name], shape, dtype, allow_cast)
    if layout.tied and _HEAD.names[0] in given:
        _check_tied(given)
    with torch.no_grad():
        for slot in slots:
            parts = [given[name] for name in slot.entry.names]
            slot.param.copy_(layout.pack(slot.rule, parts, slot.param.shape[0]))


def _read_model(model_chunks: ModelChunks, vocab_size: int | None) -> tuple[_Layout, list[_Slot]]:
    """Slots of this rank's parameters, every parameter accounted for.

    Raises:
        UnsupportedError: a module without a Hugging Face counterpart.
    """
    chunks = unwrap_chunks(model_chunks)
    for chunk in chunks:
        _check_config(chunk.config)
    layout = _Layout(chunks, vocab_size)
    slots = [
        _slot(layout, chunk, name, param)
        for chunk in chunks
        for name, param in chunk.named_parameters()
    ]
    return layout, slots


def unwrap_chunks(model_chunks: ModelChunks) -> list[GPTModel]:
    """The GPTModels inside Float16Module and DistributedDataParallel.

    Raises:
        UnsupportedError: another kind of model, or none.
    """
    chunks = unwrap_model(_as_list(model_chunks))
    if not chunks:
        raise UnsupportedError("The list of model chunks is empty; give this rank's GPTModels.")
    for chunk in chunks:
        if not isinstance(chunk, GPTModel):
            raise UnsupportedError(
                f"{type(chunk).__name__} is no GPTModel; only GPT models are served."
            )
    return chunks


def _as_list(model_chunks: ModelChunks) -> list[torch.nn.Module]:
    return [model_chunks] if isinstance(model_chunks, torch.nn.Module) else list(model_chunks)


def _check_config(config: Any) -> None:
    for module, unsupported, what in (
        ("self_attention", config.multi_latent_attention, "multi-latent attention"),
        ("self_attention", getattr(config, "attention_output_gate", False), "an output gate"),
        ("self_attention", config.rotary_interleaved, "interleaved rotary embeddings"),
        ("mlp.experts", bool(config.moe_latent_size), "latent projections"),
        ("mlp.router", bool(config.moe_router_enable_expert_bias), "a bias for each expert"),
        ("mlp.linear_fc1", not config.gated_linear_unit, "no gate (gated_linear_unit=False)"),
        ("input_layernorm", config.normalization != "RMSNorm", f"{config.normalization}"),
        ("input_layernorm", config.layernorm_zero_centered_gamma, "zero-centered weights"),
    ):
        if unsupported:
            raise UnsupportedError(
                f"Module 'decoder.layers.*.{module}' has {what}, which is not served; only "
                "Llama/Qwen-style models are."
            )


def _slot(layout: _Layout, chunk: GPTModel, name: str, param: torch.nn.Parameter) -> _Slot:
    match = _IN_LAYER.match(name)
    rules = _LAYER_RULES if match else _OUTER_RULES
    key = match.group(2) if match else name
    local, key = _expert_of(key)
    if key not in rules:
        raise UnsupportedError(
            f"Module '{name.rpartition('.')[0]}' (parameter '{name}') has no Hugging Face "
            "counterpart here; only Llama/Qwen-style models are served, without "
            "multi-token-prediction layers (Megatron-Bridge exports those)."
        )
    rule, position = rules[key], list(rules).index(key)
    exported, expert, block = True, None, position
    if rule is _HEAD and layout.tied:
        rule, exported = _EMBEDDING, False
    if match:
        decoder_layer = chunk.decoder.layers[int(match.group(1))]
        layer, names = decoder_layer.layer_number - 1, rule.names
        if rule.expert:
            expert = decoder_layer.mlp.local_expert_indices[local]
            names = tuple(hf.format(expert) for hf in names)
            block = list(rules).index("mlp.experts.linear_fc1.weight")
        else:
            names = tuple(hf.format(shared_expert_name(layout.config)) for hf in names)
        names = tuple(f"model.layers.{layer}.{hf}" for hf in names)
    else:
        layer = -1 if key.startswith("embedding.") else layout.num_layers
        names = rule.names
    shapes = layout.hf_shapes(rule, param, name)
    order = (layer, block, expert or 0, position)
    return _Slot(_Entry(order, names, shapes, param.dtype, expert), rule, param, exported)


def _expert_of(key: str) -> tuple[int, str]:
    """Local number of an expert and the rule's key, for a parameter of one expert."""
    if match := _SEQUENTIAL.match(key):
        return int(match.group(1)), f"mlp.experts.{match.group(2)}"
    if match := _GROUPED.match(key):
        return int(match.group(2)), f"mlp.experts.{match.group(1)}"
    return 0, key


def _whole_stream(layout: _Layout, slots: Sequence[_Slot]) -> list[tuple[int, _Entry]]:
    """(pipeline rank that owns it, entry) of the whole model, in order; a collective.

    Raises:
        CheckpointError: a layer is missing or held twice.
    """
    mine = [slot.entry for slot in slots if slot.exported]
    if layout.ep.size() > 1:  # each rank of a stage has experts of its own, and all of the rest
        parts: list[list[_Entry]] = [[] for _ in range(layout.ep.size())]
        torch.distributed.all_gather_object(parts, mine, group=layout.ep)
        mine = list({entry.order: entry for part in parts for entry in part}.values())
    stages: list[list[_Entry]] = [mine]
    if layout.pp.size() > 1:
        stages = [[] for _ in range(layout.pp.size())]
        torch.distributed.all_gather_object(stages, mine, group=layout.pp)
    entries = [(owner, entry) for owner, stage in enumerate(stages) for entry in stage]
    entries.sort(key=lambda item: item[1].order)
    names = [name for _, entry in entries for name in entry.names]
    layers = {entry.order[0] for _, entry in entries}
    if len(set(names)) != len(names) or layers != set(range(-1, layout.num_layers + 1)):
        raise CheckpointError(
            f"The chunks of all pipeline ranks hold {len(layers & set(range(layout.num_layers)))} "
            f"of {layout.num_layers} layers, or one of them twice; give every chunk of every rank."
        )
    return entries


def _collect(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name in given:
            raise CheckpointError(f"Tensor '{name}' is given twice; send each tensor once.")
        given[name] = tensor
    return given


def _check_names(given: Mapping[str, Tensor], expected: Iterable[str], optional: Iterable) -> None:
    known = set(expected)
    for problem, names in (
        ("missing", known - set(given)),
        ("unknown to this model", set(given) - known - set(optional)),
    ):
        if names:
            raise CheckpointError(
                f"{len(names)} tensor(s) are {problem}, the first is '{min(names)}'; give exactly "
                "the tensors of the model's Hugging Face checkpoint."
            )


def _check_tensor(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, allow_cast: bool
) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"Tensor '{name}' has shape {tuple(tensor.shape)} where the model needs {shape}; give "
            "a checkpoint of this model (and vocab_size where its vocabulary is padded)."
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise CheckpointError(
            f"Tensor '{name}' is {tensor.dtype}; give the unquantized checkpoint, the trainer "
            "keeps its weights in high precision."
        )
    if not allow_cast and torch.promote_types(tensor.dtype, dtype) != dtype:
        raise CheckpointError(
            f"Tensor '{name}' is {tensor.dtype} and would lose precision in a {dtype} parameter; "
            "convert the checkpoint or pass allow_cast=True."
        )


def _check_tied(given: Mapping[str, Tensor]) -> None:
    head, embedding = given[_HEAD.names[0]], given[_EMBEDDING.names[0]]
    if head is not embedding and not torch.equal(head, embedding):
        raise CheckpointError(
            f"'{_HEAD.names[0]}' differs from '{_EMBEDDING.names[0]}', which the model ties; "
            "build the model with untied embeddings or drop the tensor."
        )

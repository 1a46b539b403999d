"""The parameters of a Megatron-Core GPT and the Hugging Face tensors they are made of.

Megatron fuses q, k and v row by row of query groups (``[group0: its queries, k, v; group1: ...]``,
``SelfAttention.get_query_key_value_tensors`` in ``megatron/core/transformer/attention.py``), and
gate and up per tensor-parallel shard (``[gate_shard; up_shard]``,
``megatron/core/transformer/mlp.py``), and so the projections of a gated delta net
(``[q; k; v; z; b; a]``, ``megatron/core/ssm/gated_delta_net.py``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.training.layout import REPLICATED, RowLayout, qkv_layout
from megatron_fp8rl.config_checks import unknown_attention
from megatron_fp8rl.hf_names import linear_attention_layers, shared_expert_name

ModelChunks = torch.nn.Module | Sequence[torch.nn.Module]
"""A GPTModel, plain or wrapped, or the list of this rank's virtual-pipeline chunks."""

_OF_ADAPTERS = ("to_wrap", "base_layer", "lora_A", "lora_a")
"""Attributes of a linear with an adapter: of Megatron-Bridge's (``peft/adapter_wrapper.py``) and of
peft's (``tuners/lora/layer.py``)."""


@dataclass(frozen=True)
class Rule:
    """How Hugging Face tensors make up one Megatron parameter."""

    names: tuple[str, ...]
    packing: Literal["plain", "qkv", "glu", "in_proj", "conv1d"] = "plain"
    tp_dim: int | None = None
    """Dimension that tensor parallelism cuts; None where every rank holds all of it."""
    width: str = "ffn_hidden_size"
    """Config field with the number of gate's rows, for a glu."""
    expert: bool = False
    """The parameter belongs to an expert, whose number replaces ``{}`` in the names."""
    centered: bool = False
    """Megatron's zero-centered norm has the weight less one; HF multiplies by the weight itself."""


def _qkv(leaf: str) -> Rule:
    return Rule(tuple(f"self_attn.{p}_proj.{leaf}" for p in "qkv"), "qkv", tp_dim=0)


def _glu(leaf: str, block: str = "mlp", width: str = "ffn_hidden_size", **more: Any) -> Rule:
    names = (f"{block}.gate_proj.{leaf}", f"{block}.up_proj.{leaf}")
    return Rule(names, "glu", tp_dim=0, width=width, **more)


def _expert_rules(block: str, width: str, **more: Any) -> dict[str, Rule]:
    return {
        "linear_fc1.weight": _glu("weight", block, width, **more),
        "linear_fc2.weight": Rule((f"{block}.down_proj.weight",), tp_dim=1, **more),
    }


_EXPERTS = _expert_rules("mlp.experts.{}", "moe_ffn_hidden_size", expert=True)
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


_EXPERT_BIAS = "mlp.router.expert_bias"
"""A buffer, float32 whatever the model's dtype is."""
_INPUT_NORM = Rule(("input_layernorm.weight",))
_MLP_NORM = Rule(("post_attention_layernorm.weight",))
_HEAD_NORMS = Rule(("self_attn.q_norm.weight",)), Rule(("self_attn.k_norm.weight",))
# In the order of the stream. Transformer Engine fuses a norm into the linear layer behind it.
_LAYER_RULES: Mapping[str, Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": _qkv("weight"),
    "self_attention.linear_qkv.bias": _qkv("bias"),
    "self_attention.q_layernorm.weight": _HEAD_NORMS[0],
    "self_attention.k_layernorm.weight": _HEAD_NORMS[1],
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), tp_dim=1),
    "self_attention.linear_proj.bias": Rule(("self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": _glu("weight"),
    "mlp.linear_fc1.bias": _glu("bias"),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), tp_dim=1),
    "mlp.linear_fc2.bias": Rule(("mlp.down_proj.bias",)),
    "mlp.router.weight": Rule(("mlp.gate.weight",)),
    _EXPERT_BIAS: Rule(("mlp.gate.e_score_correction_bias",)),
    **{f"mlp.experts.{leaf}": rule for leaf, rule in _EXPERTS.items()},
    "mlp.shared_experts.gate_weight": Rule(("mlp.shared_expert_gate.weight",)),
    **{
        f"mlp.shared_experts.{leaf}": rule
        for leaf, rule in _expert_rules("mlp.{}", _SHARED_WIDTH).items()
    },
}
_Q_NORM = Rule(("self_attn.q_a_layernorm.weight",))
_KV_NORM = Rule(("self_attn.kv_a_layernorm.weight",))
_LATENT_ATTENTION: Mapping[str, Rule] = {  # rows are in HF's order, rotary ones too
    "self_attention.linear_q_proj.weight": Rule(("self_attn.q_proj.weight",), tp_dim=0),
    "self_attention.linear_q_down_proj.weight": Rule(("self_attn.q_a_proj.weight",), tp_dim=0),
    "self_attention.q_layernorm.weight": _Q_NORM,
    "self_attention.linear_q_up_proj.layer_norm_weight": _Q_NORM,
    "self_attention.linear_q_up_proj.weight": Rule(("self_attn.q_b_proj.weight",), tp_dim=0),
    "self_attention.linear_kv_down_proj.weight": Rule(
        ("self_attn.kv_a_proj_with_mqa.weight",), tp_dim=0
    ),
    "self_attention.kv_layernorm.weight": _KV_NORM,
    "self_attention.linear_kv_up_proj.layer_norm_weight": _KV_NORM,
    "self_attention.linear_kv_up_proj.weight": Rule(("self_attn.kv_b_proj.weight",), tp_dim=0),
}
_LATENT_LAYER_RULES: Mapping[str, Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    **_LATENT_ATTENTION,
    **{
        key: rule
        for key, rule in _LAYER_RULES.items()
        if key.startswith(("self_attention.linear_proj", "pre_mlp", "mlp."))
    },
}
_GATED_DELTA_NET: Mapping[str, Rule] = {
    "self_attention.in_proj.layer_norm_weight": _INPUT_NORM,
    "self_attention.in_proj.weight": Rule(
        tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        "in_proj",
        tp_dim=0,
    ),
    "self_attention.conv1d.weight": Rule(("linear_attn.conv1d.weight",), "conv1d", tp_dim=0),
    "self_attention.A_log": Rule(("linear_attn.A_log",), tp_dim=0),
    "self_attention.dt_bias": Rule(("linear_attn.dt_bias",), tp_dim=0),
    "self_attention.out_norm.weight": Rule(("linear_attn.norm.weight",), centered=True),
    "self_attention.out_proj.weight": Rule(("linear_attn.out_proj.weight",), tp_dim=1),
}
_HYBRID_LAYER_RULES: Mapping[str, Rule] = {**_LAYER_RULES, **_GATED_DELTA_NET}
EMBEDDING = Rule(("model.embed_tokens.weight",), tp_dim=0)
_FINAL_NORM = Rule(("model.norm.weight",))
HEAD = Rule(("lm_head.weight",), tp_dim=0)
_OUTER_RULES: Mapping[str, Rule] = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": _FINAL_NORM,
    "output_layer.weight": HEAD,
}
_IN_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
# Of one local expert: a module of its own, or the weights of a grouped one.
_SEQUENTIAL = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$")
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12]\.weight)(\d+)$")


@dataclass(frozen=True)
class StreamEntry:
    """The tensors of one Megatron parameter in the stream; the same on every rank."""

    order: tuple[int, int, int, int]
    """Sort key: layer (-1 for the embedding, num_layers after the stack), block within it, expert
    (else 0), position."""
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    expert: int | None = None


@dataclass(frozen=True)
class MappedParameter:
    """A parameter of this rank and its rule."""

    entry: StreamEntry
    rule: Rule
    param: Tensor
    """The parameter, or the bias that a router keeps as a buffer."""
    exported: bool
    """False for the last stage's copy of a tied embedding."""


class ParameterMap:
    """Pack and unpack the parameters of one model; shapes and groups come from its config."""

    def __init__(self, chunks: Sequence[GPTModel], vocab_size: int | None) -> None:
        model = chunks[0]
        self.config = model.config
        self.num_layers: int = model.config.num_layers
        self.tp = model.pg_collection.tp
        self.pp = model.pg_collection.pp
        self.ep = model.pg_collection.ep
        self.expert_tp = model.pg_collection.expt_tp
        self.tied = bool(model.share_embeddings_and_output_weights)
        if vocab_size is None:  # Megatron-Bridge's config has the size before padding
            vocab_size = getattr(model.config, "vocab_size", None) or model.vocab_size
        if type(vocab_size) is not int or not 0 < vocab_size <= model.vocab_size:
            raise CheckpointError(
                f"vocab_size={vocab_size!r} is not within the model's {model.vocab_size} (padded) "
                "vocabulary rows; give the size of the Hugging Face vocabulary."
            )
        self.vocab_size = vocab_size
        self.device = device_of(chunks)

    def rows(self, rule: Rule) -> RowLayout | None:
        """Return the row order of q, k and v; None for other parameters."""
        config = self.config
        if rule.packing != "qkv":
            return None
        return qkv_layout(
            config.num_attention_heads,
            config.num_query_groups,
            config.kv_channels,
            gated=bool(getattr(config, "attention_output_gate", False)),
        )

    def sections(self, rule: Rule) -> list[list[int]]:
        """Return the rows of each HF tensor of a packed parameter, over all ranks.

        A tensor is made of one or more sections, and each rank has its share of every section, one
        after the other. Empty for other parameters.
        """
        config = self.config
        if rule.packing == "glu":
            return [[getattr(config, rule.width)]] * 2
        if rule.packing not in ("in_proj", "conv1d"):
            return []
        heads = config.linear_num_value_heads
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = heads * config.linear_value_head_dim
        mixed = [keys, keys, values]
        return [mixed] if rule.packing == "conv1d" else [mixed, [values], [heads], [heads]]

    def _is_centered(self, rule: Rule) -> bool:
        return rule.centered and self.config.layernorm_zero_centered_gamma

    def tp_of(self, rule: Rule) -> Any:
        """Return the process group over which the parameters of a rule are split."""
        return self.expert_tp if rule.expert else self.tp

    def is_whole(self, rule: Rule, param: Tensor) -> bool:
        """Tell whether this rank holds all rows of a down projection to latents.

        TransformerEngine's has them on every tensor-parallel rank, a local one a part.
        """
        leaf = rule.names[0].split(".")[-2]
        if leaf not in REPLICATED:
            return False
        config = self.config
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        return len(param) == (config.q_lora_rank if leaf == "q_a_proj" else latent)

    def hf_shapes(self, rule: Rule, param: Tensor, where: str) -> tuple[tuple[int, ...], ...]:
        full = list(param.shape)
        if rule.tp_dim is not None:
            full[rule.tp_dim] *= self.tp_of(rule).size()
        if rule in (EMBEDDING, HEAD):
            full[0] = self.vocab_size
        if rule in _HEAD_NORMS and full != [self.config.kv_channels]:
            raise UnsupportedError(
                f"Parameter '{where}' has {full[0]} values where a norm of one head has "
                f"{self.config.kv_channels}: it norms all heads at once, as MiniMax-M2's does, "
                "whose Hugging Face names are not known here; let Megatron-Bridge load this model "
                "and export it (megatron_fp8rl.integrations.bridge.export_hf_weights)."
            )
        rows = self.rows(rule)
        sizes = [sum(part) for part in self.sections(rule)]
        if rows is not None:
            sizes = list(rows.part_rows.values())
        if not sizes:
            return (tuple(full),)
        if sum(sizes) != full[0]:
            raise UnsupportedError(
                f"Parameter '{where}' has {full[0]} rows over all tensor-parallel ranks where the "
                f"model's config gives {sum(sizes)}; this layout is not served."
            )
        return tuple((size, *full[1:]) for size in sizes)

    def unpack(self, rule: Rule, param: Tensor) -> list[Tensor]:
        """Gather one parameter over the tensor-parallel group and cut it into its HF tensors."""
        shards = [param.detach()]
        group = self.tp_of(rule)
        if rule.tp_dim is not None and group.size() > 1:
            local = param.detach().contiguous()
            shards = [torch.empty_like(local) for _ in range(group.size())]
            torch.distributed.all_gather(shards, local, group=group)
        if sections := self.sections(rule):
            sizes = [rows // len(shards) for part in sections for rows in part]
            whole = iter(
                [torch.cat(s) for s in zip(*(x.split(sizes) for x in shards), strict=True)]
            )
            return [torch.cat([next(whole) for _ in part]) for part in sections]
        # torch.cat copies even a single tensor: the stream never shares memory with the model.
        full = torch.cat(shards, rule.tp_dim or 0)
        rows = self.rows(rule)
        if rows is not None:
            return list(rows.to_hf(full).split(list(rows.part_rows.values())))
        if self._is_centered(rule):
            full = full + 1
        return [full[: self.vocab_size].clone()] if rule in (EMBEDDING, HEAD) else [full]

    def pack(self, rule: Rule, tensors: Sequence[Tensor], rows: int) -> Tensor:
        """Return this rank's shard of the parameter that HF tensors make up."""
        size, rank = self.tp_of(rule).size(), self.tp_of(rule).rank()
        if sections := self.sections(rule):
            cut = [t.split(part) for t, part in zip(tensors, sections, strict=True)]
            return torch.cat([piece.chunk(size)[rank] for pieces in cut for piece in pieces])
        layout = self.rows(rule)
        full = layout.from_hf(torch.cat(list(tensors))) if layout is not None else tensors[0]
        if self._is_centered(rule):
            full = full - 1
        if rule in (EMBEDDING, HEAD) and full.shape[0] < rows * size:
            padding = full.new_zeros(rows * size - full.shape[0], *full.shape[1:])
            full = torch.cat([full, padding])
        return full if rule.tp_dim is None else full.chunk(size, rule.tp_dim)[rank]


def read_model(
    model_chunks: ModelChunks, vocab_size: int | None
) -> tuple[ParameterMap, list[MappedParameter]]:
    """Find the rule of every parameter of this rank."""
    if in_wrapper(model_chunks):
        raise UnsupportedError(
            "This is a multimodal model, whose tower has no Hugging Face names here; export it "
            "with Megatron-Bridge (megatron_fp8rl.integrations.bridge.export_hf_weights)."
        )
    chunks = unwrap_chunks(model_chunks)
    for chunk in chunks:
        _check_served(chunk.config)
        if path := path_of_adapter(chunk):
            raise UnsupportedError(
                f"'{path}' has an adapter (LoRA), which Hugging Face's checkpoint of the model has "
                "not; merge the adapters into the weights first, or let Megatron-Bridge export the "
                "model."
            )
    mapping = ParameterMap(chunks, vocab_size)
    parameters = [
        _mapped(mapping, chunk, name, param) for chunk in chunks for name, param in _tensors(chunk)
    ]
    return mapping, parameters


def _tensors(chunk: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and of the buffers the routers' biases."""
    yield from chunk.named_parameters()
    for name, buffer in chunk.named_buffers():
        if name.endswith(f".{_EXPERT_BIAS}"):
            yield name, buffer


def unwrap_chunks(model_chunks: ModelChunks) -> list[GPTModel]:
    """Return the GPTModels inside Float16Module and DistributedDataParallel, Megatron's or torch's.

    That of a multimodal model of Megatron-Bridge is its ``language_model``.

    Raises:
        UnsupportedError: a chunk is another kind of model, or there is none.
    """
    chunks = [
        chunk.language_model if _wraps(chunk) else chunk for chunk in _unwrapped(model_chunks)
    ]
    if not chunks:
        raise UnsupportedError("The list of model chunks is empty; give this rank's GPTModels.")
    for chunk in chunks:
        if not isinstance(chunk, GPTModel):
            raise UnsupportedError(
                f"{type(chunk).__name__} is no GPTModel; give the GPTModel, or what Float16Module "
                "and DistributedDataParallel (Megatron's or torch's) have made of it."
            )
    return chunks


def in_wrapper(model_chunks: ModelChunks) -> bool:
    """Tell whether the GPTModels are the language model of a multimodal model."""
    return any(_wraps(chunk) for chunk in _unwrapped(model_chunks))


def _unwrapped(model_chunks: ModelChunks) -> list[Any]:
    found = []
    for chunk in as_list(model_chunks):
        (inner,) = unwrap_model([chunk])
        while isinstance(inner, DistributedDataParallel):
            (inner,) = unwrap_model([inner.module])
        found.append(inner)
    return found


def _wraps(chunk: Any) -> bool:
    return not isinstance(chunk, GPTModel) and isinstance(
        getattr(chunk, "language_model", None), GPTModel
    )


def as_list(model_chunks: ModelChunks) -> list[torch.nn.Module]:
    """Return the chunks as they were given, still wrapped."""
    if isinstance(model_chunks, torch.nn.Module):
        return [model_chunks]
    if isinstance(model_chunks, str) or not isinstance(model_chunks, Sequence):
        raise UnsupportedError(
            f"The model is a {type(model_chunks).__name__}; give a GPTModel, or the list of this "
            "rank's chunks."
        )
    return list(model_chunks)


def pairs_of(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
) -> Iterable[tuple[str, Tensor]]:
    """Return the pairs of name and tensor of a stream or of a mapping."""
    if isinstance(tensors, Mapping):
        return tensors.items()
    if isinstance(tensors, str | bytes) or not isinstance(tensors, Iterable):
        raise UnsupportedError(
            f"The tensors came as a {type(tensors).__name__}; give pairs of name and tensor, or a "
            "mapping, e.g. safetensors.torch.load_file(path)."
        )
    return tensors


def device_of(chunks: Sequence[GPTModel]) -> torch.device:
    """Return the device of a model."""
    device = next(p.device for chunk in chunks for p in chunk.parameters())
    if device.type == "meta":
        raise UnsupportedError(
            "The model is on the meta device, without values; give it memory (to_empty) first."
        )
    return device


def path_of_adapter(root: torch.nn.Module) -> str | None:
    """Return the path of a module with an adapter, such as LoRA's; None if there is none."""
    for path, module in root.named_modules():
        if any(hasattr(module, name) for name in _OF_ADAPTERS):
            return path
    return None


def _check_served(config: Any) -> None:
    hybrid = any(linear_attention_layers(config))
    centered = bool(config.layernorm_zero_centered_gamma)
    for module, unsupported, what in (
        ("self_attention", unknown_attention(config), unknown_attention(config)),
        ("self_attention", config.rotary_interleaved, "interleaved rotary embeddings"),
        ("mlp.experts", config.moe_latent_size, "latent projections"),
        ("mlp.linear_fc1", not config.gated_linear_unit, "no gate (gated_linear_unit=False)"),
        ("input_layernorm", config.normalization != "RMSNorm", f"{config.normalization}"),
        ("input_layernorm", centered and not hybrid, "zero-centered weights"),
        ("input_layernorm", hybrid and not centered, "weights that are not zero-centered"),
    ):
        if unsupported:
            raise UnsupportedError(
                f"Module 'decoder.layers.*.{module}' has {what}, which is not served; let "
                "Megatron-Bridge export this model, or add what is missing (docs/extending.md)."
            )


def _mapped(mapping: ParameterMap, chunk: GPTModel, name: str, param: Tensor) -> MappedParameter:
    match = _IN_LAYER.match(name)
    in_layer = _HYBRID_LAYER_RULES
    if mapping.config.multi_latent_attention:
        in_layer = _LATENT_LAYER_RULES
    rules = in_layer if match else _OUTER_RULES
    key = match.group(2) if match else name
    local, key = _expert_of(key)
    if key not in rules:
        raise UnsupportedError(
            f"Module '{name.rpartition('.')[0]}' (parameter '{name}') has no Hugging Face "
            "counterpart here; let Megatron-Bridge export this model (it also exports "
            "multi-token-prediction layers), or add a rule (docs/extending.md)."
        )
    rule, position = rules[key], list(rules).index(key)
    exported, expert, block = True, None, position
    if mapping.is_whole(rule, param):
        rule = replace(rule, tp_dim=None)
    if rule is HEAD and mapping.tied:
        rule, exported = EMBEDDING, False
    if match:
        decoder_layer = chunk.decoder.layers[int(match.group(1))]
        layer, names = decoder_layer.layer_number - 1, rule.names
        if rule.expert:
            expert = decoder_layer.mlp.local_expert_indices[local]
            names = tuple(hf.format(expert) for hf in names)
            block = list(rules).index("mlp.experts.linear_fc1.weight")
        else:
            names = tuple(hf.format(shared_expert_name(mapping.config)) for hf in names)
        names = tuple(f"model.layers.{layer}.{hf}" for hf in names)
    else:
        layer = -1 if key.startswith("embedding.") else mapping.num_layers
        names = rule.names
    shapes = mapping.hf_shapes(rule, param, name)
    order = (layer, block, expert or 0, position)
    dtype = torch.float32 if key == _EXPERT_BIAS else param.dtype
    return MappedParameter(StreamEntry(order, names, shapes, dtype, expert), rule, param, exported)


def _expert_of(key: str) -> tuple[int, str]:
    """Return the local number of an expert and the key of its rule; 0 and ``key`` otherwise."""
    if match := _SEQUENTIAL.match(key):
        return int(match.group(1)), f"mlp.experts.{match.group(2)}"
    if match := _GROUPED.match(key):
        return int(match.group(2)), f"mlp.experts.{match.group(1)}"
    return 0, key


def whole_stream(
    mapping: ParameterMap, parameters: Sequence[MappedParameter]
) -> list[tuple[int, StreamEntry]]:
    """List the entries of the whole model in order, each with the pipeline rank that owns it.

    This is a collective.

    Raises:
        CheckpointError: a layer is missing or held twice.
    """
    mine = [parameter.entry for parameter in parameters if parameter.exported]
    if mapping.ep.size() > 1:  # each rank of a stage has experts of its own, and all of the rest
        parts: list[list[StreamEntry]] = [[] for _ in range(mapping.ep.size())]
        torch.distributed.all_gather_object(parts, mine, group=mapping.ep)
        mine = list({entry.order: entry for part in parts for entry in part}.values())
    stages: list[list[StreamEntry]] = [mine]
    if mapping.pp.size() > 1:
        stages = [[] for _ in range(mapping.pp.size())]
        torch.distributed.all_gather_object(stages, mine, group=mapping.pp)
    entries = [(owner, entry) for owner, stage in enumerate(stages) for entry in stage]
    entries.sort(key=lambda item: item[1].order)
    names = [name for _, entry in entries for name in entry.names]
    layers = {entry.order[0] for _, entry in entries}
    if len(set(names)) != len(names) or layers != set(range(-1, mapping.num_layers + 1)):
        raise CheckpointError(
            f"The chunks of all pipeline ranks hold {len(layers & set(range(mapping.num_layers)))} "
            f"of {mapping.num_layers} layers, or one of them twice; give every chunk of every rank."
        )
    return entries

"""The table of model families: which modules a model has, and how each of them is treated.

Everything that depends on the kind of a model is data here: names and kinds of modules, what stays
in BF16 and why, keys of the config, the prefix under a vision wrapper, tensors beside the linear
layers, and what a refit has to make anew. vLLM's side, Megatron's side and NeMo RL's side read this
one table. Names are those of Hugging Face checkpoints, without ``.weight``.
:class:`~fp8rl.models.spec.ModelSpec` is an entry applied to the config of a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from fp8rl.recipe import ModuleKind


class Module(NamedTuple):
    """A module with a weight."""

    name: str
    """Name within the decoder layer, e.g. ``self_attn.q_proj``."""
    kind: ModuleKind
    shape: tuple[str, ...]
    """Widths of the weight by name, rows first; :mod:`fp8rl.models.sizes` computes them."""
    bias: str = ""
    """Key of the config that gives the module a bias; ``always``, or none. In a model it is one of
    these two."""
    when: str = ""
    """Key of the config without which the module is missing; ``!key`` for the opposite."""
    bf16: str = ""
    """Why the module stays in BF16 unless ``pins.fp8`` names it; empty: it runs in FP8."""


class Parameter(NamedTuple):
    """A tensor that is no module's weight and travels as it is."""

    name: str
    """Name within the decoder layer, e.g. ``mlp.gate.e_score_correction_bias``."""
    shape: tuple[str, ...]
    float32: bool = False
    """The engines keep it in float32, whatever the model's dtype is."""


@dataclass(frozen=True)
class Block:
    """The token mixer of a decoder layer: attention of some kind, or linear attention."""

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...] = ()
    kv: Literal["heads", "latent", "none"] = "heads"
    """What the layer caches per token: ``heads``: K and V, which an FP8 cache scales; ``latent``:
    one latent of all heads, without scales; ``none``."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """What the rollout engine derives from a weight, and a refit has to make again, by module; for
    docs/reference.md."""


@dataclass(frozen=True)
class Experts:
    """The experts of a decoder layer, and what is beside them."""

    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    """Keys of the number of experts; the first that is set counts."""
    width: str = "moe_intermediate_size"
    """Key of the intermediate size of an expert."""
    block: str = "mlp"
    """Name of the block within the layer; experts are ``{block}.experts.N``."""
    vllm_block: str = ""
    """Name of the block in the prefixes that vLLM gives its layers, if it is another."""
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down in an expert."""
    fused: tuple[str, str] = ("gate_up_proj", "down_proj")
    """Names of the tensors of all experts in one, beneath ``{block}.experts``."""
    shared: str = ""
    """Name of the expert that all tokens visit; empty: there is none."""
    shared_width: str = ""
    """Key of the shared expert's intermediate size."""
    shared_count: str = ""
    """Key of the number of shared experts, which are one MLP of so many times ``width``."""
    shared_gate: str = ""
    """Name of the gate of the shared expert; empty: it has none."""
    bias: str = ""
    """Name of the bias by which the router chooses (float32); empty: it has none."""


@dataclass(frozen=True)
class Family:
    """Models that share names of modules and the way in which engines run them."""

    name: str
    """Name for messages."""
    model_types: tuple[str, ...]
    """``model_type`` of the language model's config."""
    attention: Block
    linear_attention: Block | None = None
    """Block of the layers that the config's ``layer_types`` call ``linear_attention``."""
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of the linears of a dense MLP, the last one down."""
    mlp_bias: str = ""
    """Key of the config that gives the MLP's linears a bias."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Names of the norms of a decoder layer over all its hidden values."""
    experts: Experts | None = None
    wrapper: str = ""
    """Prefix of the language model's modules inside a multimodal model, in the place of
    ``model.``; empty: the family has no such models."""
    towers: tuple[str, ...] = ()
    """Names of the modules of a multimodal model beside the language model: always in BF16."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What ``rollout`` and ``training`` do not serve yet; a side that is not named serves it."""


def _attention(
    *,
    qkv_bias: str = "attention_bias",
    o_bias: str = "attention_bias",
    norms: tuple[str, str] | None = None,
    norms_when: str = "",
    queries: str = "q",
) -> Block:
    """Return attention with grouped queries.

    ``qkv_bias`` and ``o_bias`` are keys of the config; ``norms`` are the widths of the norms of
    queries and keys, which are missing without the key ``norms_when``; ``queries`` is a width.
    """
    q, k = norms or ("", "")
    modules = [
        Module("self_attn.q_proj", "qkv_proj", (queries, "hidden"), qkv_bias),
        Module("self_attn.k_proj", "qkv_proj", ("kv", "hidden"), qkv_bias),
        Module("self_attn.v_proj", "qkv_proj", ("kv", "hidden"), qkv_bias),
        Module("self_attn.o_proj", "o_proj", ("hidden", "q"), o_bias),
    ]
    if norms:
        modules += [
            Module("self_attn.q_norm", "norm", (q,), when=norms_when),
            Module("self_attn.k_norm", "norm", (k,), when=norms_when),
        ]
    return Block(tuple(modules))


_HEAD_NORMS = ("head", "head")
LATENT_ATTENTION = Block(
    modules=(
        Module("self_attn.q_proj", "qkv_proj", ("mla_q", "hidden"), when="!q_lora_rank"),
        Module(
            "self_attn.q_a_proj", "a_proj", ("q_lora", "hidden"), "attention_bias", "q_lora_rank"
        ),
        Module("self_attn.q_a_layernorm", "norm", ("q_lora",), when="q_lora_rank"),
        Module("self_attn.q_b_proj", "b_proj", ("mla_q", "q_lora"), when="q_lora_rank"),
        Module("self_attn.kv_a_proj_with_mqa", "a_proj", ("kv_a", "hidden"), "attention_bias"),
        Module("self_attn.kv_a_layernorm", "norm", ("kv_lora",)),
        Module(
            "self_attn.kv_b_proj",
            "b_proj",
            ("mla_kv", "kv_lora"),
            bf16="decode multiplies it with activations that are not quantized",
        ),
        Module("self_attn.o_proj", "o_proj", ("hidden", "mla_o"), "attention_bias"),
    ),
    kv="latent",
    derived={"self_attn.kv_b_proj": "`W_UK_T` and `W_UV` of vLLM's `MLAAttention`"},
)
_NARROW = "a few rows for each head, too narrow for blocks of 128"
GATED_DELTA_NET = Block(
    modules=(
        Module("linear_attn.in_proj_qkv", "in_proj_qkvz", ("gdn_qkv", "hidden")),
        Module("linear_attn.in_proj_z", "in_proj_qkvz", ("gdn_v", "hidden")),
        Module("linear_attn.in_proj_b", "in_proj_ba", ("gdn_heads", "hidden"), bf16=_NARROW),
        Module("linear_attn.in_proj_a", "in_proj_ba", ("gdn_heads", "hidden"), bf16=_NARROW),
        Module("linear_attn.conv1d", "conv1d", ("gdn_qkv", "one", "gdn_kernel")),
        Module("linear_attn.norm", "norm", ("gdn_head",)),
        Module("linear_attn.out_proj", "out_proj", ("hidden", "gdn_v")),
    ),
    parameters=(
        Parameter("linear_attn.A_log", ("gdn_heads",), float32=True),
        Parameter("linear_attn.dt_bias", ("gdn_heads",)),
    ),
    kv="none",
    derived={"linear_attn.conv1d": "the packed weight on a CPU"},
)
EXPERTS = Experts()
DEEPSEEK_EXPERTS = Experts(
    count=("n_routed_experts",),
    shared="shared_experts",
    shared_count="n_shared_experts",
    bias="gate.e_score_correction_bias",
)
SHARED_EXPERT = Experts(
    shared="shared_expert",
    shared_width="shared_expert_intermediate_size",
    shared_gate="shared_expert_gate",
)
SPARSE_BLOCK = Experts(
    count=("num_local_experts",),
    width="intermediate_size",
    block="block_sparse_moe",
    leaves=("w1", "w3", "w2"),
)
_WRAPPER, _VISION = "model.language_model.", ("model.visual",)


LLAMA = Family("Llama", ("llama", "mistral"), _attention(), mlp_bias="mlp_bias")
"""Also stands for a config that does not say its type."""
LLAMA_LIKE = replace(
    LLAMA, name="Llama-like", model_types=("gemma", "granite", "ministral", "ministral3", "smollm3")
)
"""Other models whose tensors have the names and shapes of Llama's."""
ARCEE = replace(LLAMA, name="Arcee", model_types=("arcee",), mlp=("up_proj", "down_proj"))
"""Without a gate."""
SEED_OSS = Family(
    "Seed-OSS", ("seed_oss",), _attention(o_bias="attention_out_bias"), mlp_bias="mlp_bias"
)
ERNIE4_5 = Family(
    "ERNIE-4.5",
    ("ernie4_5",),
    _attention(qkv_bias="use_bias", o_bias="use_bias"),
    mlp_bias="use_bias",
)
_OTHER_NORMS = {"training": "its norms, which lie in other places than Llama's"}
GEMMA2 = Family(
    "Gemma-2",
    ("gemma2",),
    _attention(),
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    missing=_OTHER_NORMS,
)
GEMMA3 = replace(
    GEMMA2, name="Gemma-3", model_types=("gemma3_text",), attention=_attention(norms=_HEAD_NORMS)
)
"""Text alone."""
COHERE = Family(
    "Cohere",
    ("cohere", "cohere2"),
    Block(
        (
            *_attention().modules,
            Module("self_attn.q_norm", "norm", ("heads", "head"), when="use_qk_norm"),
            Module("self_attn.k_norm", "norm", ("kv_heads", "head"), when="use_qk_norm"),
        )
    ),
    norms=("input_layernorm",),
    missing=_OTHER_NORMS,
)
"""Command R and Command A."""
_BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")
OLMO2 = Family(
    "OLMo-2", ("olmo2", "olmo3"), _attention(norms=("q", "kv")), norms=_BEHIND, missing=_OTHER_NORMS
)
EXAONE4 = Family(
    "EXAONE-4.0",
    ("exaone4",),
    _attention(qkv_bias="", o_bias="", norms=_HEAD_NORMS),
    norms=_BEHIND,
    missing=_OTHER_NORMS,
)
QWEN2 = Family("Qwen2", ("qwen2",), _attention(qkv_bias="always", o_bias=""))
QWEN3 = Family("Qwen3", ("qwen3",), _attention(norms=_HEAD_NORMS))
QWEN3_MOE = Family("Qwen3-MoE", ("qwen3_moe",), _attention(norms=_HEAD_NORMS), experts=EXPERTS)
QWEN2_MOE = Family(
    "Qwen2-MoE", ("qwen2_moe",), _attention(qkv_bias="qkv_bias", o_bias=""), experts=SHARED_EXPERT
)
MIXTRAL = Family(
    "Mixtral",
    ("mixtral",),
    _attention(qkv_bias="", o_bias=""),
    experts=SPARSE_BLOCK,
    missing={"training": "experts named w1, w2 and w3"},
)
DEEPSEEK_V2 = Family(
    "DeepSeek-V2", ("deepseek_v2",), LATENT_ATTENTION, experts=replace(DEEPSEEK_EXPERTS, bias="")
)
DEEPSEEK_V3 = Family(
    "DeepSeek-V3",
    ("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    LATENT_ATTENTION,
    experts=DEEPSEEK_EXPERTS,
)
"""Moonlight, Kimi-K2 and GLM-4.7-Flash too."""
GLM4_MOE = Family(
    "GLM-4.5",
    ("glm4_moe",),
    _attention(o_bias="", norms=_HEAD_NORMS, norms_when="use_qk_norm"),
    experts=DEEPSEEK_EXPERTS,
)
"""GLM-4.6 and GLM-4.7 too."""
MINIMAX_M2 = Family(
    "MiniMax-M2",
    ("minimax_m2",),
    _attention(qkv_bias="", o_bias="", norms=("q", "kv")),
    experts=replace(SPARSE_BLOCK, bias="e_score_correction_bias", vllm_block="mlp"),
    missing={"training": "experts named w1, w2 and w3"},
)
QWEN3_5 = Family(
    "Qwen3.5",
    ("qwen3_5_text",),
    _attention(norms=_HEAD_NORMS, queries="q_and_gate"),
    GATED_DELTA_NET,
    wrapper=_WRAPPER,
    towers=_VISION,
)
QWEN3_5_MOE = replace(
    QWEN3_5, name="Qwen3.5-MoE", model_types=("qwen3_5_moe_text",), experts=SHARED_EXPERT
)
QWEN3_VL = Family(
    "Qwen3-VL", ("qwen3_vl_text",), _attention(norms=_HEAD_NORMS), wrapper=_WRAPPER, towers=_VISION
)
FAMILIES = (
    *(LLAMA, QWEN2, QWEN3, LLAMA_LIKE, ARCEE, SEED_OSS, ERNIE4_5),
    *(GEMMA2, GEMMA3, COHERE, OLMO2, EXAONE4),
    *(QWEN3_MOE, QWEN2_MOE, MIXTRAL, MINIMAX_M2, GLM4_MOE),
    *(DEEPSEEK_V2, DEEPSEEK_V3),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_VL),
)
"""The table; a new family is one more entry."""

FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Modules that an engine holds in one, by the name that vLLM gives it."""
SPANS: dict[str, int] = {"in_proj_qkv": 3}
"""Modules of which one weight is several matrices of the module that an engine fuses it into."""


WIDTH_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size",),
    "vocab": ("vocab_size",),
    "head": ("num_attention_heads",),
    "mlp": ("intermediate_size",),
    "q_lora": ("q_lora_rank",),
    "kv_a": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    "gdn_qkv": (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    ),
}
"""Keys of the config from which widths in :attr:`Module.shape` are computed; ``expert`` has the key
:attr:`Experts.width`. The other widths follow from these."""


def mlp_modules(
    block: str, leaves: tuple[str, ...], width: str, bias: str = ""
) -> Iterator[Module]:
    """Yield the linears of an MLP, named ``leaves``, the last one down, ``width`` wide within."""
    kind: ModuleKind
    for leaf in leaves:
        down = leaf == leaves[-1]
        kind = "experts" if width == "expert" else "down_proj" if down else "gate_up_proj"
        yield Module(
            f"{block}.{leaf}", kind, ("hidden", width) if down else (width, "hidden"), bias
        )


def _leaves() -> Iterator[tuple[str, Module]]:
    """Yield the modules of all families by the last part of their names."""
    for family in FAMILIES:
        for block in filter(None, (family.attention, family.linear_attention)):
            for module in block.modules:
                yield module.name.rpartition(".")[2], module
        for module in mlp_modules("mlp", family.mlp, "mlp"):
            yield module.name.rpartition(".")[2], module


_KINDS: dict[str, ModuleKind] = {leaf: module.kind for leaf, module in _leaves()}
_KINDS |= {fused: _KINDS[parts[0]] for fused, parts in FUSED.items()}
_KINDS |= {"embed_tokens": "embed_tokens", "lm_head": "lm_head"}
_DEFAULTS = {leaf: module.bf16 for leaf, module in _leaves() if module.bf16}
_TOWERS = tuple(dict.fromkeys(tower for family in FAMILIES for tower in family.towers))


def entry_of(model_type: str | None) -> Family | None:
    """Return the entry of a type, :data:`LLAMA` for none; None for a type the table lacks."""
    if model_type is None:
        return LLAMA
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def served_types() -> str:
    """Return the ``model_type`` of every family, for an error about another one."""
    return ", ".join(kind for family in FAMILIES for kind in family.model_types)


def kind_of(name: str) -> ModuleKind:
    """Return the kind of a module, from its global HF name; an unknown linear is ``linear``."""
    parts = name.split(".")
    leaf = parts[-1]
    if tower_of(name):
        return "tower"
    if "experts" in parts:
        return "experts"
    if leaf in ("gate", "router", "shared_expert_gate"):
        return "router"
    if leaf.endswith(("norm", "layernorm")):
        return "norm"
    return _KINDS.get(leaf, "linear")


def default_reason(name: str) -> str:
    """Return why a module stays in BF16 unless ``pins.fp8`` names it; empty: it runs in FP8."""
    return _DEFAULTS.get(name.rpartition(".")[2], "")


def tower_of(name: str) -> str | None:
    """Return the name of the tower that a module is part of; None outside the towers."""
    return next((tower for tower in _TOWERS if f"{name}.".startswith(f"{tower}.")), None)

"""The table of model families: which modules a model has, and how each of them is treated.

Everything that depends on the kind of a model is data here: names and kinds of modules, what stays
in BF16 and why, keys of the config, the prefix under a vision wrapper, tensors beside the linear
layers, and what a refit has to make anew. vLLM's side, Megatron's side and NeMo RL's side read this
one table. Names are those of Hugging Face checkpoints, without ``.weight``.

A config is the mapping of a ``config.json`` or a transformers config; :func:`family_of` finds the
family of either.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from fp8rl.errors import ModelError, UnsupportedError
from fp8rl.recipe import ModuleKind

_MOST = 10_000
"""Largest number of layers or experts; a larger one is a mistake in a config."""
WIDEST = 2**31 - 1
"""Largest width of a matrix."""
_MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of the config of a model that takes more than text."""
_RECURRENT = ("linear_", "mamba_")
"""How keys of the config of a model with layers of linear attention or Mamba begin."""


class Module(NamedTuple):
    """A module with a weight."""

    name: str
    """Name within the decoder layer, e.g. ``self_attn.q_proj``."""
    kind: ModuleKind
    shape: tuple[str, ...]
    """Widths of the weight by name, rows first; :mod:`fp8rl.sizes` computes them."""
    bias: str = ""
    """Key of the config that gives the module a bias; ``always``, or none."""
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
    """What the rollout engine derives from a weight, and a refit has to make anew, by module."""


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
    """Attention with grouped queries.

    Args:
        qkv_bias: key of the config that gives q, k and v a bias.
        o_bias: the same for the output projection.
        norms: widths of the norms of queries and keys; None: there are none.
        norms_when: key of the config without which these norms are missing.
        queries: width of ``q_proj``.
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
            "self_attn.q_a_proj",
            "a_proj",
            ("q_lora", "hidden"),
            "attention_bias",
            when="q_lora_rank",
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
    LLAMA,
    name="Llama-like",
    model_types=("gemma", "granite", "ministral", "ministral3", "smollm3"),
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
    GEMMA2,
    name="Gemma-3",
    model_types=("gemma3_text",),
    attention=_attention(norms=_HEAD_NORMS),
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
    "Qwen2-MoE",
    ("qwen2_moe",),
    _attention(qkv_bias="qkv_bias", o_bias=""),
    experts=SHARED_EXPERT,
)
MIXTRAL = Family(
    "Mixtral",
    ("mixtral",),
    _attention(qkv_bias="", o_bias=""),
    experts=SPARSE_BLOCK,
    missing={"training": "experts named w1, w2 and w3"},
)
DEEPSEEK_V2 = Family(
    "DeepSeek-V2",
    ("deepseek_v2",),
    LATENT_ATTENTION,
    experts=replace(DEEPSEEK_EXPERTS, bias=""),
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
    "Qwen3-VL",
    ("qwen3_vl_text",),
    _attention(norms=_HEAD_NORMS),
    wrapper=_WRAPPER,
    towers=_VISION,
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


def _mlp(block: str, leaves: tuple[str, ...], width: str, bias: str = "") -> Iterator[Module]:
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
        for module in _mlp("mlp", family.mlp, "mlp"):
            yield module.name.rpartition(".")[2], module


_KINDS: dict[str, ModuleKind] = {leaf: module.kind for leaf, module in _leaves()}
_KINDS |= {fused: _KINDS[parts[0]] for fused, parts in FUSED.items()}
_KINDS |= {"embed_tokens": "embed_tokens", "lm_head": "lm_head"}
_DEFAULTS = {leaf: module.bf16 for leaf, module in _leaves() if module.bf16}
_TOWERS = tuple(dict.fromkeys(tower for family in FAMILIES for tower in family.towers))


def value_of(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key of a config; ``default`` where it is missing or null."""
    found = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return default if found is None else found


def _keys(config: Any) -> Collection[str]:
    return config if isinstance(config, Mapping) else vars(config)


def _needed(config: Any, key: str) -> Any:
    """Return the value of a key, null included, and raise KeyError where it is missing."""
    return config[key] if isinstance(config, Mapping) else getattr(config, key)


def language_config(config: Any) -> Any:
    """Return the language model's part of a config, which is all of it for a text model.

    Raises:
        ModelError: the config has a ``text_config`` that is no config.
    """
    text = value_of(config, "text_config") or config
    if isinstance(text, str | int | float | list):
        raise ModelError(
            f"The model's text_config is {reprlib.repr(text)}; correct it to an object."
        )
    return text


def family_of(config: Any) -> Family | None:
    """Return the family of a model by the ``model_type`` of its language model.

    Returns:
        :data:`LLAMA` for a config without a ``model_type``; None for a type that the table does not
        have, and for a model with experts, multi-latent or linear attention, or Mamba that its
        family lacks.
    """
    text = language_config(config)
    return None if _lacking(text) else _entry(text)


def _lacking(text: Any) -> str:
    """Say what kind of model the entry of its type does not describe; empty: it describes it."""
    entry = _entry(text)
    found = entry or LLAMA
    if bool(value_of(text, "kv_lora_rank")) != (found.attention.kv == "latent"):
        latent = found.attention.kv != "latent"
        return f"a model {'with' if latent else 'without'} multi-latent attention"
    counts = (value_of(text, key) for key in _keys(text) if "experts" in key)
    if found.experts is None and any(isinstance(n, int) and n for n in counts):
        return "an MoE model"
    if found.linear_attention is None and _is_recurrent(text):
        return "a model with linear attention or Mamba"
    return "" if entry else "a dense model"


def _is_recurrent(text: Any) -> bool:
    """Tell whether a config has layers that are no attention over keys and values."""
    kinds = value_of(text, "layer_types")
    if isinstance(kinds, list | tuple) and any(
        isinstance(kind, str) and (kind == "linear_attention" or "attention" not in kind)
        for kind in kinds
    ):
        return True
    return any(key.startswith(_RECURRENT) and value_of(text, key) for key in _keys(text))


def known_family(config: Any) -> Family:
    """Return :func:`family_of` a model.

    Raises:
        UnsupportedError: the family is not known.
    """
    family = family_of(config)
    if family is None:
        kind = value_of(language_config(config), "model_type", "this model")
        raise UnsupportedError(
            f"The modules of '{kind}' are not known (known: {served_types()}); add an entry to "
            "fp8rl/families.py (docs/extending.md), or run it without FP8."
        )
    return family


def served_types() -> str:
    """Return the ``model_type`` of every family, for an error about another one."""
    return ", ".join(kind for family in FAMILIES for kind in family.model_types)


def known_type(config: Any) -> bool:
    """Tell whether the table has the ``model_type`` of a config's language model."""
    text = language_config(config)
    return value_of(text, "model_type") is not None and _entry(text) is not None


def _entry(text: Any) -> Family | None:
    kind = value_of(text, "model_type")
    if kind is None:
        return LLAMA
    return next((family for family in FAMILIES if kind in family.model_types), None)


def modules_of(config: Any) -> list[Module]:
    """Return the modules with weights of a whole model under their global names, in order.

    Each tower of a multimodal model is one module without a shape.

    Args:
        config: the model's config, that of a multimodal wrapper included.

    Raises:
        KeyError: the config lacks a number that the names follow from.
        ModelError: the config has a value that no model has.
        UnsupportedError: the family is not known.
    """
    family, text = known_family(config), language_config(config)
    wrapped = text is not config and bool(family.wrapper)
    prefix = family.wrapper if wrapped else "model."
    modules = [Module(tower, "tower", ()) for tower in family.towers if wrapped]
    modules.append(Module(f"{prefix}embed_tokens", "embed_tokens", ("vocab", "hidden")))
    layers = range(check_count("num_hidden_layers", _needed(text, "num_hidden_layers")))
    if family.experts and not any(key in _keys(text) for key in family.experts.count):
        raise KeyError(family.experts.count[-1])
    sparse = sum(has_experts(family, text, layer) for layer in layers)
    if sparse:
        check_count(
            "number of experts in all layers", sparse * expert_count(family, text), 100 * _MOST
        )
    for layer in layers:
        modules += [
            module._replace(name=f"{prefix}layers.{layer}.{module.name}")
            for module in layer_modules(family, text, layer)
        ]
    modules.append(Module(f"{prefix}norm", "norm", ("hidden",)))
    return [*modules, Module("lm_head", "lm_head", ("vocab", "hidden"))]


def module_names(config: Any) -> list[str]:
    """Return the global names of :func:`modules_of`, and raise its errors."""
    return [module.name for module in modules_of(config)]


def dense_module_names(num_layers: int) -> list[str]:
    """Return the global names of the modules of a dense Llama-style model, in order.

    Raises:
        ModelError: ``num_layers`` is no integer from 1 to 10,000.
    """
    return module_names({"num_hidden_layers": num_layers})


def layer_modules(family: Family, config: Any, layer: int) -> Iterator[Module]:
    """Yield the modules of a decoder layer, with names within the layer and in order.

    Args:
        family: the model's family.
        config: the language model's config.
        layer: global number of the layer.
    """
    first, *others = family.norms
    yield Module(first, "norm", ("hidden",))
    for module in block_of(family, config, layer).modules:
        wanted = not module.when.startswith("!")
        if not module.when or bool(value_of(config, module.when.lstrip("!"))) == wanted:
            yield module
    yield from (Module(name, "norm", ("hidden",)) for name in others)
    experts = family.experts
    if experts is None or not has_experts(family, config, layer):
        yield from _mlp("mlp", family.mlp, "mlp", family.mlp_bias)
        return
    yield Module(f"{experts.block}.gate", "router", ("experts", "hidden"))
    if experts.shared_gate:
        yield Module(f"{experts.block}.{experts.shared_gate}", "router", ("one", "hidden"))
    leaves = experts.leaves if family.mlp[0] == "gate_proj" else experts.leaves[1:]
    for number in range(expert_count(family, config)):
        yield from _mlp(f"{experts.block}.experts.{number}", leaves, "expert")
    if _has_shared(experts, config):
        yield from _mlp(f"{experts.block}.{experts.shared}", family.mlp, "shared")


def layer_parameters(family: Family, config: Any, layer: int) -> Iterator[Parameter]:
    """Yield the tensors of a decoder layer that are no module's weight or bias, in the same way."""
    yield from block_of(family, config, layer).parameters
    experts = family.experts
    if experts is not None and experts.bias and has_experts(family, config, layer):
        yield Parameter(f"{experts.block}.{experts.bias}", ("experts",), float32=True)


def block_of(family: Family, config: Any, layer: int) -> Block:
    """Return the token mixer of a decoder layer."""
    if family.linear_attention is None:
        return family.attention
    kind = _kind_of_layer(config, "layer_types", layer)
    if kind is not None:
        linear = kind == "linear_attention"
    else:
        every = value_of(config, "full_attention_interval", 4)
        linear = (layer + 1) % check_count("full_attention_interval", every) != 0
    return family.linear_attention if linear else family.attention


def has_experts(family: Family, config: Any, layer: int) -> bool:
    """Tell whether a decoder layer has experts, by the keys of the language model's config."""
    if expert_count(family, config) == 0:
        return False
    kind = _kind_of_layer(config, "mlp_layer_types", layer)
    if kind is not None:
        return bool(kind == "sparse")
    dense = value_of(config, "mlp_only_layers", ())
    if not isinstance(dense, list | tuple):
        raise ModelError(
            f"The model's mlp_only_layers is {reprlib.repr(dense)}; correct it to a list."
        )
    step = check_count("decoder_sparse_step", value_of(config, "decoder_sparse_step", 1))
    every = check_count("moe_layer_freq", value_of(config, "moe_layer_freq", 1))
    return (
        layer not in dense
        and (layer + 1) % step == 0
        and layer >= _number(config, "first_k_dense_replace")
        and layer % every == 0
    )


def _kind_of_layer(config: Any, key: str, layer: int) -> Any:
    """Return a layer's entry in a list of the config; None where the config has no such list."""
    kinds = value_of(config, key)
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or layer >= len(kinds):
        raise ModelError(
            f"The model's {key} is {reprlib.repr(kinds)}; correct it to a list with an entry for "
            "each layer."
        )
    return kinds[layer]


def expert_count(family: Family, config: Any) -> int:
    """Return the number of experts of a layer that has experts; 0 for a dense family.

    Raises:
        ModelError: the config has a number that no model has.
    """
    for key in family.experts.count if family.experts else ():
        if (count := value_of(config, key)) is not None:
            return check_count(key, count)
    return 0


def _has_shared(experts: Experts, config: Any) -> bool:
    key = experts.shared_width or experts.shared_count
    return bool(key and _number(config, key))


def _number(config: Any, key: str) -> int:
    """Return the value of a key that may be 0 or missing.

    Raises:
        ModelError: it is no integer from 0 on.
    """
    return check_count(key, value_of(config, key, 0), WIDEST, least=0)


def shared_width(family: Family, config: Any) -> int:
    """Return the intermediate size of a layer's shared expert; 0 where there is none."""
    experts = family.experts
    if experts is None or not experts.shared:
        return 0
    if experts.shared_width:
        return _number(config, experts.shared_width)
    return _number(config, experts.shared_count) * value_of(config, experts.width, 0)


def is_biased(module: Module | None, config: Any) -> bool:
    """Tell whether a module has a bias, by the language model's config; False for None."""
    if module is None or not module.bias:
        return False
    return module.bias == "always" or bool(value_of(config, module.bias))


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


def unsupported_reason(config: Any, *, rollout: bool, training: bool) -> str | None:
    """Say why a model cannot run in FP8, by its config; None if nothing speaks against it.

    Args:
        config: the config; an empty one speaks against nothing.
        rollout: the rollout engine is to run it in FP8.
        training: the trainer is to run it in FP8.
    """
    if not (rollout or training):
        return None
    family, text = family_of(config), language_config(config)
    kind = value_of(text, "model_type", "no model_type")
    media = text is not config or any(value_of(config, key) is not None for key in _MEDIA)
    if media and not (family and family.wrapper):
        return f"a multimodal model ('{kind}') of an unknown family"
    if family is None:
        if rollout or value_of(text, "kv_lora_rank"):
            return f"{_lacking(text)} ('{kind}') of an unknown family"
        return None
    for side, wanted in (("rollout", rollout), ("training", training)):
        if wanted and side in family.missing:
            what = family.missing[side]
            return f"a {family.name} model ('{kind}'): FP8 {side} does not serve {what} yet"
    return None


def check_count(key: str, value: Any, most: int = _MOST, *, least: int = 1) -> int:
    """Return the value of a key of a config that counts layers or experts, or gives a width.

    Raises:
        ModelError: the value is no integer from ``least`` to ``most``.
    """
    if type(value) is not int or not least <= value <= most:
        raise ModelError(
            f"The model's {key} is {reprlib.repr(value)}; correct it to an integer from "
            f"{least} to {most}."
        )
    return value

"""Global Hugging Face names of the modules of a Megatron-Core GPT, by its config.

Decoder layers are ``model.layers.N``, numbered over the whole model; experts have their global
number; multi-token-prediction layers are ``mtp.layers.N``, apart from the decoder's, so that
``layers: [-1]`` is the last decoder layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8rl.models.families import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    GATED_DELTA_NET,
    LATENT_ATTENTION,
    LLAMA,
    QWEN3,
    QWEN3_5,
    SHARED_EXPERT,
    Experts,
)
from fp8rl.models.spec import ModelSpec
from megatron_fp8rl import compat

STEM, WRAPPED_STEM = "model.", QWEN3_5.wrapper
"""What precedes ``layers`` in names; all multimodal families have one wrapper."""


def module_names(config: Any, *, wrapped: bool = False) -> tuple[str, ...]:
    """List the HF names of all modules with weights in the whole model, in order."""
    spec = _spec(config, wrapped=wrapped)
    drafts: list[str] = []
    for number in range(config.mtp_num_layers or 0):  # made of the last decoder layer's spec
        drafts.append(joint_name(config, f"mtp.layers.{number}"))
        drafts += [f"mtp.layers.{number}.{module.name}" for module in spec.layers[-1].modules]
    return (*spec.names, *drafts)


def _spec(config: Any, *, wrapped: bool) -> ModelSpec:
    """Describe a GPTModel by blocks of the table, as the switches of its config say."""
    dense = QWEN3 if config.qk_layernorm else LLAMA
    linear = linear_attention_layers(config)
    family = replace(
        dense,
        attention=LATENT_ATTENTION if config.multi_latent_attention else dense.attention,
        linear_attention=GATED_DELTA_NET if any(linear) else None,
        mlp=LLAMA.mlp if config.gated_linear_unit else LLAMA.mlp[1:],
        experts=experts_of(config),
        wrapper=WRAPPED_STEM,
        towers=QWEN3_5.towers,
    )
    values = {
        **dict.fromkeys((*EXPERTS.count, *DEEPSEEK_EXPERTS.count), config.num_moe_experts),
        "num_hidden_layers": config.num_layers,
        "n_shared_experts": 1,
        "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size,
        "q_lora_rank": getattr(config, "q_lora_rank", None),
        "mlp_layer_types": ["sparse" if flag else "dense" for flag in _moe_layers(config)],
        "layer_types": ["linear_attention" if flag else "full_attention" for flag in linear],
    }
    return ModelSpec.of({"text_config": values} if wrapped else values, family)


def joint_name(config: Any, prefix: str) -> str:
    """Name the linear that joins hidden states and embeddings before an MTP layer.

    HF's name is for the only MTP layer of a model.
    """
    return "mtp.fc" if config.mtp_num_layers == 1 else f"{prefix}.eh_proj"


def experts_of(config: Any) -> Experts | None:
    """Return the table's entry for the experts of a GPTModel: Qwen's shared expert has a gate,
    DeepSeek's has none.
    """
    if config.num_moe_experts is None:
        return None
    if config.moe_shared_expert_intermediate_size is None:
        return EXPERTS
    return SHARED_EXPERT if config.moe_shared_expert_gate else DEEPSEEK_EXPERTS


def shared_expert_name(config: Any) -> str:
    """Return the HF name of the shared expert; empty: there is none."""
    experts = experts_of(config)
    return "" if experts is None else experts.shared


def linear_attention_layers(config: Any) -> list[bool]:
    """Tell for each decoder layer whether it is a gated delta net, which has no keys and values."""
    if getattr(config, "experimental_attention_variant", None) not in compat.GATED_DELTA_NETS:
        return [False] * config.num_layers
    frequency = config.linear_attention_freq
    if isinstance(frequency, int):
        return [(number + 1) % frequency != 0 for number in range(config.num_layers)]
    return [bool(flag) for flag in frequency]


def _moe_layers(config: Any) -> list[bool]:
    """Tell for each decoder layer whether it has experts (models/gpt/gpt_layer_specs.py)."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        return [number % frequency == 0 for number in range(config.num_layers)]
    return [bool(flag) for flag in frequency]

"""Models that ``quantization="fp8rl"`` serves, and the HF names of their modules."""

from __future__ import annotations

from typing import Any

from fp8rl.errors import UnsupportedError
from fp8rl.families import (
    EXPERT_KEYS,
    MOE_MODELS,
    check_count,
    dense_module_names,
    has_experts,
    moe_module_names,
)
from vllm_fp8rl.names import NAME

_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_WIDEST = 2**31 - 1


def is_moe(hf_config: Any) -> bool:
    """Return whether a transformers config is that of a MoE model."""
    return any(getattr(hf_config, key, None) for key in EXPERT_KEYS)


def is_moe_layer(hf_config: Any, layer: int) -> bool:
    """Return whether a decoder layer has experts."""
    return is_moe(hf_config) and has_experts(vars(hf_config), layer)


def module_names(hf_config: Any) -> list[str]:
    """Return the HF names of the modules with weights, in order."""
    if not is_moe(hf_config):
        return dense_module_names(hf_config.num_hidden_layers)
    return moe_module_names(
        hf_config.num_experts,
        [is_moe_layer(hf_config, layer) for layer in range(hf_config.num_hidden_layers)],
    )


def check_architecture(hf_config: Any, top_config: Any) -> None:
    """Refuse a model whose modules are not known here.

    Args:
        hf_config: config of the language model.
        top_config: config of the whole model.

    Raises:
        UnsupportedError: a multimodal model, or a MoE model that is not one of ``MOE_MODELS``.
    """
    kind = getattr(hf_config, "model_type", "this model")
    if hf_config is not top_config:
        why = "a multimodal model"
    elif is_moe(hf_config) and kind not in MOE_MODELS:
        key = next(key for key in EXPERT_KEYS if getattr(hf_config, key, None))
        why = f"another MoE model ({key})"
    else:
        return
    raise UnsupportedError(
        f"quantization='{NAME}' serves dense Llama/Qwen3-style models and {', '.join(MOE_MODELS)}, "
        f"but {kind} is {why}; start it without."
    )


def check_sizes(hf_config: Any) -> None:
    """Refuse sizes that no model has; vLLM accepts some of them and divides by others.

    Raises:
        ModelError: names the key.
    """
    for key in _WIDTHS:
        value = getattr(hf_config, key, None)
        if value is not None:
            check_count(key, value, _WIDEST)


def check_widths(hf_config: Any, ranks: int, *, expert_parallel: bool) -> None:
    """Refuse a number of ranks that does not divide the widths that are split.

    Raises:
        UnsupportedError: names the intermediate size of MLPs, or of experts.
    """
    layers = range(hf_config.num_hidden_layers)
    experts = [is_moe_layer(hf_config, layer) for layer in layers]
    widths = {}
    if not all(experts):
        widths["mlp.gate_up_proj"] = ("intermediate_size", hf_config.intermediate_size)
    if any(experts) and not expert_parallel:
        widths["mlp.experts"] = ("moe_intermediate_size", hf_config.moe_intermediate_size)
    for module, (key, width) in widths.items():
        if width % ranks:
            raise UnsupportedError(
                f"'model.layers.*.{module}' cannot be split: {key}={width} is no multiple of "
                f"tensor_parallel_size={ranks}; choose another tensor parallel size."
            )

"""Module names of the model families that fp8rl knows: dense Llama/Qwen3-style and Qwen3-MoE-style.

Names are those of Hugging Face checkpoints, without ``.weight``, for the whole model. Pins are
resolved against them (:mod:`fp8rl.pinning`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fp8rl.errors import ModelError

MOE_MODELS = ("qwen3_moe",)
"""``model_type`` of the MoE models whose module names are known here."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of a ``config.json`` that give the number of experts."""
_MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of the ``config.json`` of a model that takes more than text."""
_MOST = 10_000
"""Largest number of layers or experts; a larger one is a mistake in a config."""


def dense_module_names(num_layers: int) -> list[str]:
    """HF names of the modules with weights of a dense Llama/Qwen3-style model, in order.

    Raises:
        ModelError: ``num_layers`` is no integer from 1 to 10,000.
    """
    check_count("num_hidden_layers", num_layers)
    inner = layer_module_names()
    layers = [f"model.layers.{i}.{name}" for i in range(num_layers) for name in inner]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


def moe_module_names(num_experts: int, layers: Sequence[bool]) -> list[str]:
    """HF names of the modules with weights of a Qwen3-MoE-style model, in order.

    Args:
        num_experts: number of experts of a layer that has experts.
        layers: whether each decoder layer has experts.

    Raises:
        ModelError: the number of layers or experts is out of range.
    """
    check_count("num_hidden_layers", len(layers))
    check_count("num_experts", num_experts)
    check_count("number of experts in all layers", max(1, num_experts * sum(layers)), 100 * _MOST)
    names = [
        f"model.layers.{layer}.{name}"
        for layer, sparse in enumerate(layers)
        for name in layer_module_names(num_experts=num_experts if sparse else None)
    ]
    return ["model.embed_tokens", *names, "model.norm", "lm_head"]


def layer_module_names(
    *, gated: bool = True, num_experts: int | None = None, shared_expert: str | None = None
) -> list[str]:
    """HF names of one decoder layer's modules, within the layer and in order.

    Args:
        gated: the MLP has a gate projection.
        num_experts: number of experts (Qwen3-MoE's names); None for a dense MLP.
        shared_expert: name of the expert that all tokens visit, if the layer has one.
    """
    mlp = ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj")
    blocks = ["mlp"]
    if num_experts is not None:
        blocks = [f"mlp.experts.{number}" for number in range(num_experts)]
        blocks += [f"mlp.{shared_expert}"] if shared_expert else []
    names = ["input_layernorm", *(f"self_attn.{part}_proj" for part in "qkvo")]
    names.append("post_attention_layernorm")
    if num_experts is not None:
        names.append("mlp.gate")
        names += ["mlp.shared_expert_gate"] if shared_expert == "shared_expert" else []
    return names + [f"{block}.{part}" for block in blocks for part in mlp]


def config_module_names(config: Mapping[str, Any]) -> list[str] | None:
    """HF names of the modules with weights, in order, as far as a ``config.json`` tells.

    Returns:
        The names; None for an MoE model other than Qwen3-MoE.

    Raises:
        KeyError: the config lacks a number that the names follow from.
        ModelError: the config has a value that no model has.
    """
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ModelError(
            f"The model's text_config is {reprlib.repr(config)}; correct it to an object."
        )
    layers = range(check_count("num_hidden_layers", config["num_hidden_layers"]))
    if config.get("model_type") in MOE_MODELS:
        key = "num_local_experts" if "num_local_experts" in config else "num_experts"
        experts = check_count(key, config[key])  # transformers 5 writes the first
        check_count("decoder_sparse_step", config.get("decoder_sparse_step", 1))
        dense = config.get("mlp_only_layers")
        if not isinstance(dense, list | tuple | None):
            raise ModelError(
                f"The model's mlp_only_layers is {reprlib.repr(dense)}; correct it to a list."
            )
        return moe_module_names(experts, [has_experts(config, layer) for layer in layers])
    if any("experts" in key for key in config):
        return None
    return dense_module_names(len(layers))


def has_experts(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a decoder layer of a Qwen3-MoE model has experts, by the keys of its config."""
    return (
        layer not in (config.get("mlp_only_layers") or ())
        and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def unsupported_reason(config: Mapping[str, Any], *, rollout: bool, training: bool) -> str | None:
    """Say why a model cannot run in FP8, by its ``config.json``; None if nothing speaks against it.

    Args:
        config: values of the ``config.json``; an empty one speaks against nothing.
        rollout: the rollout engine is to run it in FP8.
        training: the trainer is to run it in FP8.
    """
    if not (rollout or training):
        return None
    if any(key in config for key in _MEDIA):
        return "a multimodal model"
    if config.get("kv_lora_rank"):
        return "a model with multi-latent attention ('kv_lora_rank')"
    key = next((key for key in EXPERT_KEYS if config.get(key)), None)
    if rollout and key is not None and config.get("model_type") not in MOE_MODELS:
        return f"an MoE model ('{key}') other than {', '.join(MOE_MODELS)}"
    return None


def check_count(key: str, value: Any, most: int = _MOST) -> int:
    """The value of a key of a ``config.json`` that counts layers or experts, or gives a width.

    Raises:
        ModelError: the value is no integer from 1 to ``most``.
    """
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(
            f"The model's {key} is {reprlib.repr(value)}; correct it to an integer from 1 to "
            f"{most}."
        )
    return value

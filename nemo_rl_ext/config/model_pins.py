"""Checks of a run's model and pins in the driver, before Ray starts workers that would fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl import PluginManager, Recipe
from fp8rl.errors import ModelError, PinError, RecipeError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext.config.drivers import MEGATRON
from nemo_rl_ext.config.exact import refuse_inexact_model
from nemo_rl_ext.config.keys import kv_dtype

_NO_LATENTS = {
    "fp8_e4m3": "over an FP8 cache of latents vLLM also quantizes the absorbed query, with a scale "
    "that no trainer observes",
    "int8_per_token_head": "vLLM has no INT8 cache of latents",
}
"""Why multi-latent attention is not served with a KV cache of this dtype."""


def check_pins(
    recipe: Recipe, where: str, policy: Mapping[str, Any], model: ModelSpec | None
) -> tuple[str, ...]:
    """Refuse a model that is not served, and pins that match nothing or half of a fused module.

    Where the model's config cannot be read here, or its modules are unknown, the workers check.

    Args:
        recipe: the run's recipe.
        where: full path of the key that holds it.
        policy: NeMo RL's section, with ``model_name``.
        model: the model, by its ``config.json`` (:func:`model_spec`); None where it is not here.

    Returns:
        Sentences for the log. One names what grouped experts in FP8 need, since the worker's
        environment cannot be examined from here.

    Raises:
        RecipeError: with the path of the pin.
        UnsupportedError: the model cannot run in FP8, or not with an FP8 KV cache.
    """
    reason = None
    if model is not None:
        reason = model.refused(rollout=recipe.rollout, training=recipe.training)
    if reason is not None:
        raise UnsupportedError(
            f"'{where}' does not serve '{policy.get('model_name')}', {reason}; remove the block."
        )
    dtype = kv_dtype(recipe)
    if dtype != "auto" and model and model.entry and model.entry.attention.kv == "latent":
        raise UnsupportedError(
            f"'{where}.kv_cache.dtype' is {dtype}, but the cache of "
            f"'{policy.get('model_name')}', which has multi-latent attention, is served in BF16 "
            f"alone: {_NO_LATENTS[dtype]}; set it to auto."
        )
    notes = []
    pins = None
    grouped = (policy.get("megatron_cfg") or {}).get("moe_grouped_gemm")
    if model is None or not model.has_names:
        notes.append(
            f"the modules of '{policy.get('model_name')}' are not known here; pins are checked by "
            "the workers."
        )
        fp8_experts = bool(grouped) and "experts" not in recipe.pins.kinds
    else:
        try:
            pins = PluginManager().pin_policy(recipe.pins, model.names)
        except PinError as error:
            raise RecipeError(f"{where}.{error} ('{policy.get('model_name')}')") from error
        experts = (name for name in model.names if ".experts." in name)
        fp8_experts = any(pins.precision(name) == "fp8" for name in experts)
    if recipe.exact:
        refuse_inexact_model(
            where,
            policy.get("model_name"),
            model,
            pins,
            ranks=(policy.get("megatron_cfg") or {}).get("tensor_model_parallel_size") or 1,
        )
        notes.append(
            "exact needs DeepGEMM in the environment of a trainer on a GPU, which NeMo RL's own "
            "'mcore' environment lacks; install it there."
        )
    # Megatron-Bridge groups the experts of Qwen3-MoE where the key is not set.
    if recipe.training and fp8_experts and grouped in (None, True):
        notes.append(
            "grouped experts in FP8 need DeepGEMM in the trainer's environment, which NeMo RL's "
            f"own 'mcore' environment lacks; install it there, set '{MEGATRON}.moe_grouped_gemm' "
            f"to false, or add 'experts' to '{where}.pins.kinds'."
        )
    return tuple(notes)


def model_spec(values: Mapping[str, Any], policy: Mapping[str, Any]) -> ModelSpec | None:
    """Describe the model of a run; None without values.

    Args:
        values: see :func:`model_config`.
        policy: NeMo RL's section.

    Raises:
        ModelError: the config has numbers that no model can have.
    """
    try:
        return ModelSpec.of(values) if values else None
    except ModelError as error:
        raise ModelError(f"'{policy.get('model_name')}': {error}") from None


def read_model(policy: Mapping[str, Any]) -> ModelSpec | None:
    """Describe the model that ``policy.model_name`` names; None where it cannot be read."""
    return model_spec(model_config(policy), policy)


def model_config(policy: Mapping[str, Any], *, offline: bool = False) -> dict[str, Any]:
    """Read the ``config.json`` that ``policy.model_name`` names, with NeMo RL's overrides of it.

    Args:
        policy: NeMo RL's section.
        offline: look in folders and in the Hugging Face cache alone.

    Returns:
        Its values; none where it cannot be read.
    """
    from transformers import PretrainedConfig

    try:
        data, _ = PretrainedConfig.get_config_dict(policy["model_name"], local_files_only=offline)
    except (OSError, KeyError):
        return {}
    return with_overrides(data, policy)


def with_overrides(data: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a ``config.json`` with ``policy.hf_config_overrides``."""
    return {**data, **(policy.get("hf_config_overrides") or {})}

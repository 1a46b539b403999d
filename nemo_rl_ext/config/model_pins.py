"""Checks of a run's model and pins in the driver, before Ray starts workers that would fail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl import PinPolicy, PluginManager
from fp8rl.errors import ModelError, PinError, RecipeError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext.config.drivers import BLOCK, MEGATRON
from nemo_rl_ext.config.exact import refuse_inexact_model
from nemo_rl_ext.config.keys import kv_dtype
from nemo_rl_ext.config.plan import RunPlan

_NO_LATENTS = {
    "fp8_e4m3": "over an FP8 cache of latents vLLM also quantizes the absorbed query, with a scale "
    "that no trainer observes",
    "int8_per_token_head": "vLLM has no INT8 cache of latents",
}
"""Why multi-latent attention is not served with a KV cache of this dtype."""


def check_model(
    plan: RunPlan, policy: Mapping[str, Any], model: ModelSpec | None
) -> tuple[RunPlan, PinPolicy | None]:
    """Refuse a model that is not served, and pins that match nothing or half of a fused module.

    Where the model's config cannot be read here, or its modules are unknown, the workers check.

    Returns:
        The plan with sentences for the log, one of which names what grouped experts in FP8 need,
        since the worker's environment cannot be examined from here; and the resolved pins, None
        where the modules are unknown.
    """
    recipe, where, name = plan.recipe, plan.where, plan.model
    reason = None
    if model is not None:
        reason = model.refused(rollout=recipe.rollout, training=recipe.training)
    if reason is not None:
        raise UnsupportedError(f"'{where}' does not serve '{name}', {reason}; remove the block.")
    if model is not None and not plan.megatron and plan.replaces_trainer:
        _require_dense(model, name, plan.trainer)
    dtype = kv_dtype(recipe)
    if dtype != "auto" and model and model.entry and model.entry.attention.kv == "latent":
        raise UnsupportedError(
            f"'{where}.kv_cache.dtype' is {dtype}, but the cache of '{name}', which has "
            "multi-latent attention, is served in BF16 alone: "
            f"{_NO_LATENTS[dtype]}; set it to auto."
        )
    notes = []
    pins = None
    megatron = policy.get("megatron_cfg") or {}
    grouped = megatron.get("moe_grouped_gemm")
    if model is None or not model.has_names:
        notes.append(
            f"the modules of '{name}' are not known here; pins are checked by the workers."
        )
        fp8_experts = bool(grouped) and "experts" not in recipe.pins.kinds
    else:
        try:
            pins = PluginManager().pin_policy(recipe.pins, model.names)
        except PinError as error:
            raise RecipeError(f"{where}.{error} ('{name}')") from error
        fp8_experts = any(
            pins.precision(module) == "fp8" for module in model.names if ".experts." in module
        )
    if recipe.exact:
        ranks = megatron.get("tensor_model_parallel_size") or 1
        refuse_inexact_model(plan, model, pins, ranks=ranks)
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
    return plan.model_copy(update={"notes": (*plan.notes, *notes)}), pins


def _require_dense(model: ModelSpec, name: str, section: str) -> None:
    """Refuse a model that FP8 training without Megatron does not serve in NeMo RL."""
    from torch_fp8rl.modules import SERVED

    if model.experts or model.multimodal or not any(model.entry is each for each in SERVED):
        raise UnsupportedError(
            f"'{section}.{BLOCK}' serves dense Llama, Mistral, Qwen2 and Qwen3, and '{name}' is of "
            f"the type '{model.model_type}'; train it with Megatron, or remove the block there."
        )


def model_spec(
    policy: Mapping[str, Any], values: Mapping[str, Any] | None = None, *, offline: bool = False
) -> ModelSpec | None:
    """Describe the model of a run; None where its ``config.json`` cannot be read."""
    found = model_config(policy, values, offline=offline)
    try:
        return ModelSpec.of(found) if found else None
    except ModelError as error:
        raise ModelError(f"'{policy.get('model_name')}': {error}") from None


def model_config(
    policy: Mapping[str, Any], values: Mapping[str, Any] | None = None, *, offline: bool = False
) -> dict[str, Any]:
    """Read the ``config.json`` that ``policy.model_name`` names, with NeMo RL's overrides of it.

    Args:
        values: of another ``config.json``, in its place.
        offline: look in folders and in the Hugging Face cache alone.
    """
    if values is None:
        try:
            from transformers import PretrainedConfig

            name = policy["model_name"]
            values, _ = PretrainedConfig.get_config_dict(name, local_files_only=offline)
        except (ImportError, OSError, KeyError):
            return {}
    return {**values, **(policy.get("hf_config_overrides") or {})}

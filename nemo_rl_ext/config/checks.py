"""Checks that refuse config keys without effect, and settings that fp8rl does not support.

Each message names the key by its full path and the remedy. The checks run before Ray has started
and before anything in the config has been changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import RecipeError, UnsupportedError
from fp8rl.recipe import KVCache
from nemo_rl_ext.config.drivers import BLOCK, GUARD, LOSS, MEGATRON, VLLM, Driver
from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.config.keys import (
    READERS,
    block_path,
    has_fp8_kv,
    needs_our_trainer,
    trainer_sends_kv_scales,
)

KV_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN", "FLASHINFER")
"""Attention backends that ``vllm_fp8rl.quantization.kv_cache.check_backend`` knows."""


def refuse_unread_settings(
    block: Mapping[str, Any],
    given: Recipe,
    where: str,
    blocks: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    driver: Driver,
) -> None:
    """Refuse what the block asks for and no section acts on; defaults and BF16 ask for nothing."""
    acting = set(blocks)
    if not sections[MEGATRON].get("enabled"):
        acting.discard(MEGATRON)
        if set(blocks) == {MEGATRON}:
            raise UnsupportedError(
                f"'{where}' needs '{MEGATRON}.enabled' true: DTensor workers train in BF16; set "
                "it, or remove the block."
            )
    for key, readers in READERS.items():
        value = getattr(given, key)
        asks = key in block and value != type(value)() and value != KVCache(dtype="auto")
        if not asks or acting & set(readers):
            continue
        missing = [path for path in readers if path in driver.serves]
        if MEGATRON in blocks and key == "training":
            reason = f"DTensor workers train in BF16; set it to false, or '{MEGATRON}.enabled' true"
        elif missing:
            reason = (
                f"'{block_path(missing[0])}' is not set; interpolate the block there, or remove it"
            )
        else:
            reason = (
                f"{driver.scripts[0]} has no use for it ({driver.unsupported_reason}); remove it"
            )
        raise RecipeError(f"'{where}.{key}' has no effect: {reason}.")


def refuse_unserved(
    recipe: Recipe,
    config: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    driver: Driver,
    corrected: bool,
) -> None:
    policy = config.get("policy") or {}
    loss = sections[LOSS]
    transport = (policy.get("generation") or {}).get("refit_transport")
    fp8 = recipe.rollout or recipe.training
    if policy.get("quant_cfg") and fp8 and needs_our_trainer(policy):
        raise UnsupportedError(
            "'policy.quant_cfg' selects a Megatron worker of another number format in place of "
            "fp8rl's; remove it, or the fp8rl block."
        )
    if recipe.rollout and transport is not None:
        raise UnsupportedError(
            f"'policy.generation.refit_transport' is '{transport}', which writes past vLLM's "
            "weight loaders; FP8 rollouts are served with null (CUDA IPC or NCCL broadcast)."
        )
    if (
        recipe.rollout
        and LOSS in driver.serves
        and not corrected
        and not loss.get("use_importance_sampling_correction")
    ):
        raise RecipeError(
            f"FP8 rollouts need a correction of their logprobs: set '{LOSS}.{BLOCK}' or "
            f"'{LOSS}.use_importance_sampling_correction'."
        )
    if recipe.rollout and sections[VLLM].get("pipeline_parallel_size", 1) > 1:
        raise UnsupportedError(
            f"'{VLLM}.pipeline_parallel_size' is {sections[VLLM]['pipeline_parallel_size']}, but "
            f"FP8 rollouts are served with 1; use '{VLLM}.tensor_parallel_size'."
        )
    if has_fp8_kv(recipe):
        _refuse_fp8_kv(config, sections, driver)
    if corrected:
        _refuse_split_batches(recipe, config, driver)


def _refuse_fp8_kv(
    config: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], driver: Driver
) -> None:
    grpo, vllm = config.get("grpo") or {}, sections[VLLM]
    sent = driver.sends_kv_scales and trainer_sends_kv_scales(config.get("policy") or {})
    reason = None
    if (
        sent
        and sections[MEGATRON].get("pipeline_model_parallel_size", 1) > 1
        and sections[MEGATRON].get(BLOCK) is None
    ):
        reason = (
            f"'{MEGATRON}.{BLOCK}' where '{MEGATRON}.pipeline_model_parallel_size' is above 1: "
            "NeMo RL's own calibration numbers the layers of a stage from 0"
        )
    elif driver.name == "ppo":
        reason = "a GRPO driver: PPO's guards are tied to 'precision: fp8'"
    elif vllm.get("async_engine"):
        reason = f"'{VLLM}.async_engine' false: asynchronous rollouts get no KV scales"
    elif (grpo.get("async_grpo") or {}).get("enabled"):
        reason = "'grpo.async_grpo.enabled' false: its refits send no KV scales"
    elif vllm.get("expert_parallel_size", 1) > vllm.get("tensor_parallel_size", 1) and (
        not sent or grpo.get("val_at_start")
    ):
        who = "'grpo.val_at_start' false or " if sent else ""
        if driver.sends_kv_scales and not sent:
            who = f"'{MEGATRON}.enabled' true or "
        reason = (
            f"{who}'{VLLM}.expert_parallel_size' up to '{VLLM}.tensor_parallel_size': engines that "
            "share experts cannot calibrate themselves one by one"
        )
    if reason:
        raise UnsupportedError(
            f"'{VLLM}.{BLOCK}.kv_cache.dtype' fp8_e4m3 needs {reason}; or set it to auto."
        )
    arguments = ((config.get("policy") or {}).get("generation") or {}).get("vllm_kwargs") or {}
    backend = arguments.get("attention_backend")
    if backend is not None and str(backend).upper() not in KV_BACKENDS:
        raise UnsupportedError(
            f"'policy.generation.vllm_kwargs.attention_backend' is '{backend}', which is not known "
            f"to read the KV scales of each refit; choose one of {', '.join(KV_BACKENDS)}, or set "
            f"'{VLLM}.{BLOCK}.kv_cache.dtype' to auto."
        )


def refuse_unseen_batches(
    recipe: Recipe, config: Mapping[str, Any], loss: Mapping[str, Any], driver: Driver
) -> None:
    """Refuse settings for whole batches where the loops do not compute ``prev_logprobs``."""
    threshold = (config.get("grpo") or {}).get("seq_logprob_error_threshold")
    if driver.name == "ppo" or not loss.get("force_on_policy_ratio") or threshold is not None:
        return
    settings = recipe.importance_sampling
    path = f"{LOSS}.{BLOCK}.importance_sampling"
    for key, value in (
        (f"{path}.self_normalize", settings.self_normalize),
        (f"{path}.rejection", settings.rejection),
        (f"{path}.token_veto", settings.token_veto),
        (f"{LOSS}.{GUARD}", loss.get(GUARD)),
    ):
        if value not in (None, False):
            raise UnsupportedError(
                f"'{key}' needs the trainer's logprobs of the whole batch, which "
                f"'{LOSS}.force_on_policy_ratio' leaves out; set it to false, or set "
                "'grpo.seq_logprob_error_threshold'."
            )


def refuse_fixed_engines(
    guard: GuardConfig, recipe: Recipe, config: Mapping[str, Any], vllm: Mapping[str, Any]
) -> None:
    """Refuse the guard's fallback for engines that cannot be started anew in their workers."""
    if guard.fallback != "bf16" or not recipe.rollout:
        return
    health = (config.get("async_rl") or {}).get("generation_fleet_health") or {}
    reason = None
    if vllm.get("expose_http_server"):
        reason = f"'{VLLM}.expose_http_server' false: the server keeps the engine it began with"
    elif vllm.get("expert_parallel_size", 1) > vllm.get("tensor_parallel_size", 1):
        reason = (
            f"'{VLLM}.expert_parallel_size' up to '{VLLM}.tensor_parallel_size': engines that "
            "share experts cannot be started anew one by one"
        )
    elif health.get("enabled"):
        reason = (
            "'async_rl.generation_fleet_health.enabled' false: it takes workers that do not answer "
            "while their engines start for dead"
        )
    if reason:
        raise UnsupportedError(
            f"'{LOSS}.{GUARD}.fallback' bf16 needs {reason}; or set it to stop, which ends the run."
        )


def _refuse_split_batches(recipe: Recipe, config: Mapping[str, Any], driver: Driver) -> None:
    settings = recipe.importance_sampling
    path = f"{LOSS}.{BLOCK}.importance_sampling"
    data_plane = (config.get("data_plane") or {}).get("enabled")
    if not data_plane and driver.name != "single_controller":
        return
    if settings.self_normalize:
        raise UnsupportedError(
            f"'{path}.self_normalize' needs 'data_plane.enabled' false: the data plane carries no "
            "weights to the workers."
        )
    if settings.rejection is not None and settings.rejection.level == "token":
        raise UnsupportedError(
            f"'{path}.rejection.level' token needs 'data_plane.enabled' false, where single tokens "
            "cannot leave the batch; use mode 'mask', or level 'sequence' or 'geometric'."
        )


def not_served(driver: Driver) -> str:
    return f"{driver.scripts[0]} serves none ({driver.unsupported_reason}), so remove it."

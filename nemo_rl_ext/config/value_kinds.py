"""Kinds of upstream's values that are read here, checked before anything is decided by them.

NeMo RL checks the values of some sections and takes those of others as they come. A text such as
``"false"`` in the place of a switch counts as true, and one in the place of a number ends in a
comparison of two types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fp8rl.errors import RecipeError
from nemo_rl_ext.config.drivers import LOSS, MEGATRON, VLLM
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.rules import broken

_Kind = tuple[str, Callable[[Any], bool], str]
"""Path of a key, whether a value fits it, and what it must be."""

_SWITCHES = (
    *(
        f"{VLLM}.{key}"
        for key in (
            "is_mx",
            "async_engine",
            "pow2_weight_scaling_factors",
            "pow2_activation_scaling_factors",
            "refit_prequantize",
            "refit_with_reload_api",
        )
    ),
    "policy.generation.vllm_kwargs.enable_lora",
    "policy.generation.colocated.enabled",
    "policy.generation.nvfp4_pertoken_rollout.enabled",
    "policy.router_replay.enabled",
    *(
        f"{MEGATRON}.{key}"
        for key in (
            "enabled",
            "peft.enabled",
            "fp8_cfg.enabled",
            "fp4_cfg.enabled",
            "zero_train_gen_mismatch",
            "first_last_layers_bf16",
            "apply_rope_fusion",
            "moe_grouped_gemm",
            "model_overrides.first_last_layers_bf16",
            "model_overrides.moe_router_fusion",
        )
    ),
    f"{LOSS}.use_importance_sampling_correction",
    f"{LOSS}.sequence_level_importance_ratios",
    f"{LOSS}.force_on_policy_ratio",
    "grpo.val_at_start",
    "grpo.async_grpo.enabled",
    "ppo.async_ppo.enabled",
    "data_plane.enabled",
)
"""Keys that are true or false."""

_SIZES = (
    f"{VLLM}.tensor_parallel_size",
    f"{VLLM}.pipeline_parallel_size",
    f"{VLLM}.expert_parallel_size",
    f"{MEGATRON}.pipeline_model_parallel_size",
)
_NUMBERS_OF_LAYERS = tuple(
    f"{section}.{key}"
    for section, keys in (
        (VLLM, ("num_first_layers_in_bf16", "num_last_layers_in_bf16")),
        (MEGATRON, ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")),
        (
            f"{MEGATRON}.model_overrides",
            ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
        ),
    )
    for key in keys
)
_AGES = (
    "grpo.async_grpo.max_trajectory_age_steps",
    "ppo.async_ppo.max_trajectory_age_steps",
)
_NUMBERS = tuple(f"{LOSS}.truncated_importance_sampling_ratio{end}" for end in ("", "_min"))
_TEXTS = ("policy.model_name", f"{LOSS}.truncated_importance_sampling_type")
_MAPPINGS = ("policy.hf_config_overrides",)
"""Sections that no other check looks into."""


_SWITCH = (lambda value: type(value) in (bool, int) and value in (0, 1), "true or false")
_COUNT = (lambda value: type(value) is int and value >= 1, "a whole number of at least 1")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _fits_or_absent(fits: Callable[[Any], bool], value: Any) -> bool:
    return value is None or fits(value)


def _rules(*kinds: tuple[tuple[str, ...], Callable[[Any], bool], str]) -> tuple[_Kind, ...]:
    return tuple(
        (path, partial(_fits_or_absent, fits), wanted)
        for paths, fits, wanted in kinds
        for path in paths
    )


KINDS = _rules(
    (_SWITCHES, *_SWITCH),
    (_SIZES, *_COUNT),
    (_NUMBERS_OF_LAYERS, lambda value: type(value) is int and value >= 0, "a number of layers"),
    (_AGES, lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    (_NUMBERS, _is_number, "a number"),
    (_TEXTS, lambda value: isinstance(value, str), "a text"),
    ((f"{VLLM}.quantization_ignored_layer_kws",), _is_list_of_words, "a list of words"),
)
"""Rules of the keys that decide what fp8rl does."""
SIZES = _rules(
    (
        (
            "policy.offload_optimizer_for_refit",
            f"{MEGATRON}.optimizer.optimizer_cpu_offload",
            f"{MEGATRON}.optimizer.use_distributed_optimizer",
            f"{MEGATRON}.optimizer.use_precision_aware_optimizer",
        ),
        *_SWITCH,
    ),
    (
        (
            f"{MEGATRON}.tensor_model_parallel_size",
            f"{MEGATRON}.context_parallel_size",
            "cluster.num_nodes",
            "cluster.gpus_per_node",
            "policy.generation.colocated.resources.num_nodes",
            "policy.generation.colocated.resources.gpus_per_node",
            "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
            "env.reward_model.resources.num_nodes",
            "env.reward_model.resources.gpus_per_node",
        ),
        *_COUNT,
    ),
    (
        (f"{VLLM}.gpu_memory_utilization",),
        lambda value: type(value) in (int, float) and 0 <= value <= 1,
        "a number from 0 to 1",
    ),
)
"""Rules of the keys from which the doctor counts GPUs and memory."""


def refuse_wrong_kinds(sections: Sections, kinds: tuple[_Kind, ...] = KINDS) -> None:
    """Refuse a value of another kind than its key has; null counts as absent.

    Raises:
        RecipeError: with the path of the key.
    """
    for path in _MAPPINGS:
        sections.at(path)
    for path, value, _, wanted in broken(kinds, sections):
        remedy = "correct or remove it"
        if isinstance(value, str) and "list" in wanted:
            remedy = f"write [{value}]"
        elif isinstance(value, str):
            remedy = "write it without quotes, an environment variable as "
            remedy += "${oc.decode:${oc.env:NAME}}"
        raise RecipeError(f"'{path}' must be {wanted}, not {value!r}; {remedy}.")

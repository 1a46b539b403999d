"""Kinds of upstream's values that are read here, checked before anything is decided by them.

NeMo RL checks the values of some sections and takes those of others as they come. A text such as
``"false"`` in the place of a switch counts as true, and one in the place of a number ends in a
comparison of two types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from fp8rl.errors import RecipeError
from nemo_rl_ext.config.drivers import LOSS, MEGATRON, VLLM
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.config.rules import broken

_Kind = tuple[str, Callable[[Any], bool], str]
"""Path of a key, whether a value fits it, and what it must be."""


def _at(section: str, keys: str) -> tuple[str, ...]:
    """Return the paths of keys, with spaces between them, in a section."""
    return tuple(f"{section}.{key}" for key in keys.split())


_SWITCHES = (
    *_at(
        VLLM,
        "is_mx async_engine pow2_weight_scaling_factors pow2_activation_scaling_factors "
        "refit_prequantize refit_with_reload_api",
    ),
    *_at(
        "policy",
        "generation.vllm_kwargs.enable_lora generation.colocated.enabled "
        "generation.nvfp4_pertoken_rollout.enabled router_replay.enabled",
    ),
    *_at(
        MEGATRON,
        "enabled peft.enabled fp8_cfg.enabled fp4_cfg.enabled zero_train_gen_mismatch "
        "first_last_layers_bf16 apply_rope_fusion moe_grouped_gemm "
        "model_overrides.first_last_layers_bf16 model_overrides.moe_router_fusion",
    ),
    *_at(
        LOSS,
        "use_importance_sampling_correction sequence_level_importance_ratios force_on_policy_ratio",
    ),
    "grpo.val_at_start",
    "grpo.async_grpo.enabled",
    "ppo.async_ppo.enabled",
    "data_plane.enabled",
)
"""Keys that are true or false."""

_SIZES = (
    *_at(VLLM, "tensor_parallel_size pipeline_parallel_size expert_parallel_size"),
    f"{MEGATRON}.pipeline_model_parallel_size",
)
_AT_ENDS = "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
_NUMBERS_OF_LAYERS = (
    *_at(VLLM, "num_first_layers_in_bf16 num_last_layers_in_bf16"),
    *_at(MEGATRON, _AT_ENDS),
    *_at(f"{MEGATRON}.model_overrides", _AT_ENDS),
)
_AGES = tuple(f"{loop}.async_{loop}.max_trajectory_age_steps" for loop in ("grpo", "ppo"))
_NUMBERS = tuple(f"{LOSS}.truncated_importance_sampling_ratio{end}" for end in ("", "_min"))
_TEXTS = ("policy.model_name", f"{LOSS}.truncated_importance_sampling_type")
_MAPPINGS = ("policy.hf_config_overrides",)
"""Sections that no other check looks into."""


_SWITCH = (lambda value: type(value) in (bool, int) and value in (0, 1), "true or false")
_COUNT = (lambda value: type(value) is int and value >= 1, "a whole number of at least 1")


def _rules(*kinds: tuple[tuple[str, ...], Callable[[Any], bool], str]) -> tuple[_Kind, ...]:
    return tuple(
        (path, lambda value, fits=fits: value is None or fits(value), wanted)
        for paths, fits, wanted in kinds
        for path in paths
    )


KINDS = _rules(
    (_SWITCHES, *_SWITCH),
    (_SIZES, *_COUNT),
    (_NUMBERS_OF_LAYERS, lambda value: type(value) is int and value >= 0, "a number of layers"),
    (_AGES, lambda value: type(value) is int and value >= 0, "a whole number of at least 0"),
    (_NUMBERS, lambda value: type(value) in (int, float) and math.isfinite(value), "a number"),
    (_TEXTS, lambda value: isinstance(value, str), "a text"),
    (
        (f"{VLLM}.quantization_ignored_layer_kws",),
        lambda value: isinstance(value, list | tuple) and all(isinstance(w, str) for w in value),
        "a list of words",
    ),
)
"""Rules of the keys that decide what fp8rl does."""
SIZES = _rules(
    (
        (
            "policy.offload_optimizer_for_refit",
            *_at(
                f"{MEGATRON}.optimizer",
                "optimizer_cpu_offload use_distributed_optimizer use_precision_aware_optimizer",
            ),
        ),
        *_SWITCH,
    ),
    (
        (
            "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
            *_at("cluster", "num_nodes gpus_per_node"),
        ),
        *_COUNT,
    ),
)
"""Rules of the keys from which the doctor computes memory."""


def refuse_wrong_kinds(sections: Sections, kinds: tuple[_Kind, ...] = KINDS) -> None:
    """Refuse a value of another kind than its key has; null counts as absent."""
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

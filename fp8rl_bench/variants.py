"""The precisions of rollouts that are compared, and what tells their engines apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl.recipe import KVDtype

VARIANTS = {
    "bf16": "BF16",
    "fp8rl-kv": "fp8rl, FP8 cache",
    "stock-kv": "vLLM's FP8, FP8 cache",
    "fp8rl-int8": "fp8rl, INT8 cache",
    "fp8rl": "fp8rl, BF16 cache",
    "fp8rl-exact": "fp8rl, exact",
    "stock": "vLLM's FP8, BF16 cache",
    "stock-int8": "vLLM's FP8, INT8 cache",
}
"""What people read, in the order in which ``fp8rl bench`` measures."""
KV_SCALE = 0.05
"""KV scale of random weights."""


def cache_of(variant: str) -> KVDtype:
    """Return the dtype of a variant's KV cache."""
    ends: dict[str, KVDtype] = {
        "kv": "fp8_e4m3",
        "exact": "fp8_e4m3",
        "int8": "int8_per_token_head",
    }
    return ends.get(variant.partition("-")[2], "auto")


def needs_scales(variant: str) -> bool:
    """Tell whether an engine has to be given KV scales."""
    return variant.startswith("fp8rl") and cache_of(variant) == "fp8_e4m3"


def recipe_of(variant: str, keys: Mapping[str, Any] | None = None) -> Any:
    """Return the recipe of one of fp8rl's variants, with further ``keys``."""
    from fp8rl import Recipe

    exact = {"exact": True} if variant.endswith("exact") else {}
    return Recipe.from_dict({**exact, **(keys or {}), "kv_cache": {"dtype": cache_of(variant)}})


def engine_arguments(
    variant: str, keys: Mapping[str, Any] | None = None, *, trained: bool = False
) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a variant.

    Args:
        trained: the engine loads a checkpoint in BF16, which vLLM's own FP8 quantizes.
    """
    if variant == "bf16":
        return {}
    if variant.startswith("stock") and trained:
        return {"quantization": "fp8_per_block", "kv_cache_dtype": cache_of(variant)}
    if variant.startswith("stock"):
        described = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        cache = cache_of(variant)
        return {"hf_overrides": {"quantization_config": described}, "kv_cache_dtype": cache}
    import vllm_fp8rl

    return vllm_fp8rl.engine_args(recipe_of(variant, keys))

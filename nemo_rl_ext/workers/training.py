"""What the Megatron workers' seams do; the trainer's plugin is imported when it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fp8rl import Recipe
from fp8rl.kv_scales import scales_from_amax
from nemo_rl_ext.driver.mismatch_guard import LOGGER

logger = logging.getLogger(LOGGER)

KEY = "policy.megatron_cfg.fp8rl"
OBSERVER = "fp8rl_qkv_observer"
"""Attribute of the worker's model."""


def recipe_of(policy: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a policy worker, or None.

    Raises:
        RecipeError: the block is bad; the message has every key's full path.
    """
    block = (policy.get("megatron_cfg") or {}).get("fp8rl")
    return None if block is None else Recipe.from_dict(block, where=KEY)


def pre_wrap_hook(recipe: Recipe) -> Callable[[list[torch.nn.Module]], list[torch.nn.Module]]:
    """Converts the model's linear layers; see :func:`megatron_fp8rl.bridge.pre_wrap_hook`."""
    from megatron_fp8rl.bridge import pre_wrap_hook as hook

    return hook(recipe)


def sends_kv_scales(policy: Mapping[str, Any]) -> bool:
    """Whether this trainer's rollouts have an FP8 KV cache of ours."""
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    return "fp8rl" in vllm and str(vllm.get("kv_cache_dtype", "auto")).startswith("fp8")


def kv_scales_withdrawn(policy: Mapping[str, Any]) -> bool:
    """Whether the guard has put engines with a BF16 cache in the place of this trainer's."""
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    return "fp8rl" in vllm and not sends_kv_scales(policy)


def observe(model: torch.nn.Module) -> None:
    """Watch q, k and v in every forward of the model from now on."""
    from megatron_fp8rl.observers import QKVObserver

    object.__setattr__(model, OBSERVER, QKVObserver(model))


def kv_scales(
    worker: Any,
    recipe: Recipe,
    *,
    data: Any,
    micro_batch_size: int | None = None,
    percentile: float = 99.9,
    margin: float = 1.05,
    include_q: bool = False,
) -> dict[str, Any]:
    """KV scales in the form of upstream's ``calibrate_qkv_fp8_scales``, the same on every rank.

    Args:
        worker: a ``MegatronPolicyWorkerImpl``.
        recipe: its ``kv_cache.margin`` counts; ``margin`` and ``percentile`` are upstream's, and
            the largest magnitude is taken in the place of a percentile.
        data: batch for a calibration forward, used when no forward has run since the last call.
        micro_batch_size: of that forward.
        percentile: not used, see above.
        margin: not used, see above.
        include_q: also return scales of q.

    Raises:
        ScaleError: a layer saw no token, or a NaN.
    """
    observer = getattr(worker.model, OBSERVER, None)
    if observer is None:
        observe(worker.model)
        observer = getattr(worker.model, OBSERVER)
    amax = observer.amax()
    forward = not bool((amax > 0).all())  # alike on every rank: amax is a maximum over the world
    if forward:
        worker.model.eval()
        with torch.no_grad():
            worker.get_logprobs(
                data=data, micro_batch_size=micro_batch_size, require_router_replay=False
            )
        amax = observer.amax()
    observer.reset()
    scales = scales_from_amax(amax, recipe.kv_cache.margin)
    logger.info(
        "fp8rl: KV scales from %s: %s",
        "a calibration forward" if forward else "the step's forwards",
        ", ".join(f"{name} {float(scale):.6g}" for name, scale in _extremes(scales)),
    )
    return {
        "format": "fp8",
        "percentile": 100.0,
        "margin": recipe.kv_cache.margin,
        "layers": {
            name: float(scale)
            for name, scale in scales.items()
            if include_q or not name.endswith("q_scale")
        },
    }


def _extremes(scales: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Smallest and largest, for the log."""
    ordered = sorted(scales.items(), key=lambda item: float(item[1]))
    return [ordered[0], ordered[-1]]

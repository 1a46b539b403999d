"""The ``fp8rl`` keys of a NeMo RL config: where they stand and what has been read of them.

One block, a :class:`fp8rl.Recipe`, stands at up to three places (interpolated from one): with
``policy.generation.vllm_cfg.fp8rl`` the rollouts run by it, with ``policy.megatron_cfg.fp8rl`` the
Megatron trainer, with ``loss_fn.fp8rl`` the loss. ``loss_fn.fp8rl_guard`` is a
:class:`nemo_rl_ext.config.guard.GuardConfig`. :mod:`nemo_rl_ext.config.drivers` says which
of them a driver serves, :mod:`nemo_rl_ext.config.merge` reads and spreads them, and
:mod:`nemo_rl_ext.config.checks` refuses what nobody would act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8rl import Recipe
from nemo_rl_ext.config.drivers import BLOCK, LOSS, MEGATRON, VLLM
from nemo_rl_ext.config.guard import GuardConfig

READERS = {
    "rollout": (VLLM,),
    "training": (MEGATRON,),
    "weights": (VLLM, MEGATRON),
    "activations": (VLLM, MEGATRON),
    "pins": (VLLM, MEGATRON),
    "kv_cache": (VLLM,),
    "importance_sampling": (LOSS,),
}
"""Key of a recipe -> sections of which one must have the block, or nobody acts on the key."""


@dataclass(frozen=True)
class Keys:
    """What a config asks for, after comparison with upstream's keys."""

    recipe: Recipe
    places: tuple[str, ...]
    """Paths at which the block stands, the first one for messages."""
    guard: GuardConfig | None
    notes: tuple[str, ...]
    """Sentences for the log."""


def section(config: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The section of a config at a dotted path; empty where it is missing."""
    found: Any = config
    for part in path.split("."):
        found = found.get(part) or {}
    return found


def block_path(section: str) -> str:
    """Full path of the block in a section; "" is the top level."""
    return f"{section}.{BLOCK}" if section else BLOCK


def trainer_sends_kv_scales(policy: Mapping[str, Any]) -> bool:
    """Whether the trainer can send KV scales; DTensor workers cannot."""
    return bool((policy.get("megatron_cfg") or {}).get("enabled"))


def needs_our_trainer(policy: Mapping[str, Any]) -> bool:
    """Whether a Megatron worker must be our subclass.

    It must be also where only the rollouts are ours: they may take KV scales from this trainer.
    """
    megatron = policy.get("megatron_cfg") or {}
    vllm = (policy.get("generation") or {}).get("vllm_cfg") or {}
    asked = megatron.get(BLOCK) is not None or vllm.get(BLOCK) is not None
    return bool(megatron.get("enabled")) and asked


def has_fp8_kv(recipe: Recipe) -> bool:
    """Whether the rollouts keep their KV cache in FP8."""
    return recipe.rollout and recipe.kv_cache.dtype != "auto"

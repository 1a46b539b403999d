"""The ``fp8rl`` keys of a NeMo RL config, and the sections in which they stand.

One block, a :class:`fp8rl.Recipe`, stands at up to four places (interpolated from one): with
``policy.generation.vllm_cfg.fp8rl`` the rollouts run by it, with ``policy.megatron_cfg.fp8rl`` the
Megatron trainer or with ``policy.dtensor_cfg.fp8rl`` (since NeMo RL 0.8.0
``policy.automodel_cfg.fp8rl``) the other one, with ``loss_fn.fp8rl`` the loss.
``loss_fn.fp8rl_guard`` is a :class:`nemo_rl_ext.config.guard.GuardConfig`.
:mod:`nemo_rl_ext.config.drivers` says which of them a driver serves,
:mod:`nemo_rl_ext.config.merge` reads and spreads them, and :mod:`nemo_rl_ext.config.checks` refuses
what nobody would act on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl import Recipe
from fp8rl.errors import RecipeError
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.drivers import (
    AUTOMODEL,
    BLOCK,
    DTENSOR,
    FSDP,
    LOSS,
    MEGATRON,
    VLLM,
    Driver,
)

_TRAINERS = (MEGATRON, *FSDP)

READERS = {
    "rollout": (VLLM,),
    "training": _TRAINERS,
    "weights": (VLLM, *_TRAINERS),
    "activations": (VLLM, *_TRAINERS),
    "pins": (VLLM, *_TRAINERS),
    "kv_cache": (VLLM,),
    "rope_dtype": (VLLM,),
    "importance_sampling": (LOSS,),
    "exact": (VLLM, MEGATRON),
    "allow_untested_gpu": (VLLM,),
}
"""Key of a recipe -> sections of which one must have the block, or nobody acts on the key."""


class Sections:
    """The sections of a config that are compared with the block, and the blocks in them."""

    def __init__(self, config: Mapping[str, Any], driver: Driver) -> None:
        self.config, self.driver = config, driver
        self.policy, self.generation = self.at("policy"), self.at("policy.generation")
        self.vllm, self.megatron, self.loss = self.at(VLLM), self.at(MEGATRON), self.at(LOSS)

    @property
    def blocks(self) -> dict[str, Any]:
        """The block in each section that has one, by the section's path."""
        given = {path: self.at(path) for path in (VLLM, *_TRAINERS, LOSS)}
        return {p: section[BLOCK] for p, section in given.items() if section.get(BLOCK) is not None}

    @property
    def trainer(self) -> str:
        """Path of the section of the trainer that runs."""
        return MEGATRON if self.megatron.get("enabled") else self.without_megatron

    @property
    def without_megatron(self) -> str:
        """Path of the section of NeMo RL's trainer without Megatron."""
        return AUTOMODEL if self.at(AUTOMODEL) else DTENSOR

    @property
    def builds_by_automodel(self) -> bool:
        """Whether Automodel builds the models of that trainer."""
        return self.without_megatron == AUTOMODEL or bool(self.at(DTENSOR).get("_v2"))

    @property
    def is_trainer_ours(self) -> bool:
        """Whether the trainer that runs does so by the block."""
        return self.trainer in self.blocks

    def at(self, path: str) -> Mapping[str, Any]:
        """Return the section at a dotted path; empty where it is missing or null."""
        found: Any = self.config
        parts = [part for part in path.split(".") if part]
        for number, part in enumerate(parts, 1):
            found = found.get(part)
            if found is None:
                return {}
            if not isinstance(found, Mapping):
                raise RecipeError(
                    f"'{'.'.join(parts[:number])}' is {found!r}, not a section with keys; correct "
                    "the config."
                )
        return found

    @property
    def other_trainer(self) -> str:
        """Name of NeMo RL's trainer without Megatron, by the section that this config has."""
        return "Automodel" if self.without_megatron == AUTOMODEL else "DTensor"

    @property
    def sends_kv_scales(self) -> bool:
        """Whether refits bring KV scales of the trainer; others make none."""
        return self.driver.sends_kv_scales and self._rounds_kv

    def trainer_can_round(self, dtype: KVDtype) -> bool:
        """Tell whether the trainer can round K and V as a rollout's cache of this dtype does."""
        if dtype == "int8_per_token_head":
            return self._rounds_kv
        return dtype == "fp8_e4m3" and self.sends_kv_scales

    @property
    def _rounds_kv(self) -> bool:
        """Whether the trainer's worker is one of ours, which sees and rounds K and V."""
        return self.trainer == MEGATRON or self.is_trainer_ours

    @property
    def shares_experts(self) -> bool:
        """Whether the experts of a model are spread over several engines."""
        experts = self.vllm.get("expert_parallel_size") or 1
        return bool(experts > (self.vllm.get("tensor_parallel_size") or 1))


def block_path(section: str) -> str:
    """Full path of the block in a section; "" is the top level."""
    return f"{section}.{BLOCK}" if section else BLOCK


def kv_dtype(recipe: Recipe) -> KVDtype:
    """Return the dtype of the rollouts' KV cache."""
    return recipe.kv_cache.dtype if recipe.rollout else "auto"


def has_fp8_kv(recipe: Recipe) -> bool:
    """Tell whether the rollouts keep their KV cache in FP8, with scales that must be sent."""
    return recipe.rollout and recipe.kv_cache.has_scales

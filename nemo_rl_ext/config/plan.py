"""`RunPlan`: what a run of NeMo RL does with our keys, decided once, in the driver.

:func:`nemo_rl_ext.config.merge.read` makes it. It travels as a plain dict, the key
:data:`~nemo_rl_ext.config.drivers.PLAN` of the sections that NeMo RL hands to its trainers
(``policy``) and to its loss (``loss_fn``), and each of them reads it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fp8rl import Recipe
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.drivers import BLOCK, DTENSOR, FSDP, MEGATRON, PLAN, VLLM
from nemo_rl_ext.config.guard import GuardConfig


class RunPlan(BaseModel):
    """What a config asks for, after comparison with upstream's keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str
    """Name in :data:`~nemo_rl_ext.config.drivers.DRIVERS`."""
    recipe: Recipe
    """Its ``kv_cache.in_training`` is true only where the trainer rounds K and V."""
    sections: tuple[str, ...]
    """Paths of the sections that have the block, the first one for messages."""
    model: str = ""
    """``policy.model_name``."""
    megatron: bool = False
    """Whether Megatron workers train; else DTensor or Automodel workers do."""
    kv_scales: Literal["trainer", "engine"] | None = None
    """Who makes the scales of an FP8 KV cache: the trainer, which sends them with its refits, or
    each engine for itself. None where the cache has none."""
    guard: GuardConfig | None = None
    queues_batches: bool = False
    """Whether batches may wait for their training across a refit."""
    notes: tuple[str, ...] = ()
    """Sentences for the log."""

    @classmethod
    def of(cls, section: Any) -> RunPlan | None:
        """Read the plan that a section of a config, a mapping or a model, has; None without one."""
        mapping = isinstance(section, Mapping)
        written = section.get(PLAN) if mapping else getattr(section, PLAN, None)
        return None if written is None else cls.model_validate(written)

    def to_dict(self) -> dict[str, Any]:
        """Return the plain dict that :meth:`of` reads."""
        return self.model_dump(mode="json")

    @property
    def where(self) -> str:
        """Full path of the block, for messages."""
        return f"{self.sections[0]}.{BLOCK}"

    @property
    def trainer(self) -> str:
        """Path of the section of the trainer that runs."""
        other = next((section for section in self.sections if section in FSDP), DTENSOR)
        return MEGATRON if self.megatron else other

    @property
    def replaces_trainer(self) -> bool:
        """Whether the trainer's worker must be our subclass.

        Megatron's must be also where only the rollouts are ours: they may take KV scales from it.
        """
        return self.trainer in self.sections or (self.megatron and VLLM in self.sections)

    @property
    def of_trainer(self) -> Recipe | None:
        """The recipe by which the trainer runs; None where it is upstream's own."""
        return self.recipe if self.trainer in self.sections else None

    @property
    def rounded_as(self) -> KVDtype:
        """Dtype of the KV cache as which the trainer rounds K and V; ``auto``: it does not."""
        return self.recipe.kv_cache.dtype if self.recipe.kv_cache.in_training else "auto"

    @property
    def in_pieces(self) -> bool:
        """Whether the batch of a step comes in several calls."""
        return self.driver == "single_controller"

"""`MismatchGuard`: tighten the rejection, skip a step, then go back to BF16 rollouts.

Where FP8 rollouts drift away from the trainer, the variance of the correction grows first and the
reward falls later. verl, slime and NeMo RL do not fall back by themselves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fp8rl.errors import RecipeError
from fp8rl.reading import explain

LOGGER = "nemo_rl.fp8rl"
"""A child of NeMo RL's own logger, whose level (``NRL_LOG_LEVEL``) lets INFO through."""

logger = logging.getLogger(LOGGER)

Level = Literal["normal", "tight", "skip", "bf16", "stop"]
LEVELS: tuple[Level, ...] = ("normal", "tight", "skip", "bf16")
"""By their number in the metric ``guard_level``; a run that stops logs nothing."""
Above = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]


class GuardConfig(BaseModel):
    """``loss_fn.fp8rl_guard``; bounds are on ``token_mult_prob_error``, 1 is perfect."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tighten_above: Above = 1.1
    """Above this, sequences outside ``geometric`` are rejected."""
    skip_above: Above = 1.5
    """Above this, the step is left out."""
    release_below: Above = 1.05
    """A step below this counts towards going back to normal."""
    release_after: Annotated[int, Field(ge=1)] = 5
    """Steps in a row below ``release_below``."""
    fallback_after: Annotated[int, Field(ge=1)] = 3
    """Skipped steps in a row after which rollouts go back to BF16."""
    fallback: Literal["bf16", "stop"] = "bf16"
    """``bf16``: the engines are started anew with BF16 linears and KV cache, and the run goes on;
    ``stop``: the run ends."""
    geometric: Above = 1.05
    """While tight, a sequence stays if its geometric mean ratio is within this factor of 1."""

    @model_validator(mode="after")
    def _ordered(self) -> GuardConfig:
        if not self.release_below <= self.tighten_above <= self.skip_above:
            raise ValueError("release_below <= tighten_above <= skip_above must hold")
        return self

    @classmethod
    def from_dict(cls, data: Any, *, where: str) -> GuardConfig:
        """Validate a plain mapping.

        Raises:
            RecipeError: with the full path of every bad key.
        """
        if not isinstance(data, Mapping):
            raise RecipeError(f"'{where}' must be a mapping, not {type(data).__name__}.")
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise RecipeError(f"Bad guard: {explain(error, where)}") from None


@dataclass
class MismatchGuard:
    """The guard's state over the steps of a run.

    It rises at once and falls only after ``release_after`` good steps in a row, so that it does not
    oscillate around a bound. ``bf16`` is its level from the step in which it gives up FP8 rollouts
    until BF16 engines have replaced the FP8 ones (:meth:`fell_back`); where rollouts are in BF16
    already, the level is ``stop`` instead.
    """

    config: GuardConfig
    bf16: bool = False
    """Whether rollouts are in BF16."""
    max_age: int = 0
    """Steps by which the sequences of a batch may be older than the last refit."""
    level: Level = "normal"
    good: int = 0
    skipped: int = 0
    old: int = 0
    """Coming steps whose sequences may still come from the replaced engines."""

    def observe(self, error: float) -> Level:
        """Return the level for the step whose batch has this ``token_mult_prob_error``."""
        before = self.level
        self.level = self._next(error)
        if self.level != before:
            logger.warning(
                "fp8rl guard: %s -> %s: token_mult_prob_error is %.4f (tighten above %g, skip "
                "above %g; %d skipped, %d good steps in a row).",
                before,
                self.level,
                error,
                self.config.tighten_above,
                self.config.skip_above,
                self.skipped,
                self.good,
            )
        return self.level

    def fell_back(self) -> None:
        """Note that BF16 engines have replaced the FP8 ones; their record begins anew."""
        self.bf16 = True
        self.level = "tight"
        self.skipped = 0
        self.old = self.max_age

    def _next(self, error: float) -> Level:
        config = self.config
        if self.level == "bf16":
            return "bf16"
        old, self.old = self.old > 0, max(self.old - 1, 0)
        self.good = self.good + 1 if error < config.release_below else 0
        if not math.isfinite(error) or error > config.skip_above:
            if old:
                return "skip"
            self.skipped += 1
            return "skip" if self.skipped <= config.fallback_after else self._give_up()
        self.skipped = 0
        if error > config.tighten_above:
            return "tight"
        if self.level == "normal" or self.good >= config.release_after:
            return "normal"
        return "tight"

    def _give_up(self) -> Level:
        return "stop" if self.bf16 or self.config.fallback == "stop" else "bf16"

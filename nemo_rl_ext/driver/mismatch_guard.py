"""`MismatchGuard`: tighten the rejection, skip a step, then end the run.

Where FP8 rollouts drift away from the trainer, the variance of the correction grows first and the
reward falls later. verl, slime and NeMo RL train on.
"""

from __future__ import annotations

import logging
import math
import statistics
from dataclasses import dataclass, field
from typing import Literal

from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

Level = Literal["normal", "tight", "skip", "stop"]
TIGHTEN, SKIP, RELEASE = 2.0, 5.0, 1.5
"""Bounds in distances of the run's usual error from 1. They were chosen on one healthy run, whose
steps lie within 1.3 of it (18 steps of SmolLM2-135M in FP8: 1.18 to 1.25)."""
LEVELS: tuple[Level, ...] = ("normal", "tight", "skip")
"""By their number in the metric ``guard_level``; a run that stops logs nothing."""


@dataclass
class MismatchGuard:
    """The guard's state over the steps of a run.

    It rises at once and falls only after ``release_after`` good steps in a row, so that it does not
    oscillate around a bound.
    """

    config: GuardConfig
    bf16: bool = False
    """Whether rollouts are in BF16; then they are not what sets the engines apart."""
    level: Level = "normal"
    good: int = 0
    skipped: int = 0
    """Steps in a row that were left out, for either reason."""
    emptied: int = 0
    """Those of ``skipped`` of which rejection left nothing."""
    first: list[float] = field(default_factory=list)
    """Errors of the first ``learn_steps`` steps that were not left out."""

    @property
    def tighten_above(self) -> float:
        """Bound above which sequences are rejected."""
        return self._raised(self.config.tighten_above, TIGHTEN)

    @property
    def skip_above(self) -> float:
        """Bound above which a step is left out."""
        return self._raised(self.config.skip_above, SKIP)

    @property
    def release_below(self) -> float:
        """Bound below which a step is good."""
        return self._raised(self.config.release_below, RELEASE)

    def _raised(self, least: float, distances: float) -> float:
        if not self.first or len(self.first) < self.config.learn_steps:
            return least
        return max(least, 1 + distances * (statistics.median(self.first) - 1))

    def asks(self, error: float) -> Level:
        """Return ``normal``, ``tight`` or ``skip``, without a change of state.

        Args:
            error: ``token_mult_prob_error`` of a batch, or of a part of one.
        """
        if not math.isfinite(error) or error > self.skip_above:
            return "skip"
        if error > self.tighten_above:
            return "tight"
        released = self._good_with(error) >= self.config.release_after
        return "normal" if self.level == "normal" or released else "tight"

    def observe(self, error: float, *, emptied: bool = False) -> Level:
        """Return the level for the step whose batch has this ``token_mult_prob_error``.

        Args:
            error: of all tokens of the batch, before any rejection.
            emptied: rejection left nothing to train on, so the step is left out, and counts as one
                whose error is above ``skip_above``.
        """
        before = self.level
        self.level = self._next(error, emptied)
        if self.level != before:
            logger.warning(
                "fp8rl guard: %s -> %s: token_mult_prob_error is %.4f%s (tighten above %g, skip "
                "above %g; %d skipped, %d good steps in a row).",
                before,
                self.level,
                error,
                " and rejection left no token" if emptied else "",
                self.tighten_above,
                self.skip_above,
                self.skipped,
                self.good,
            )
        if self.level in ("normal", "tight"):
            self._learn(error)
        return self.level

    def _learn(self, error: float) -> None:
        if len(self.first) >= self.config.learn_steps:
            return
        self.first.append(error)
        if self.tighten_above > self.config.tighten_above:
            logger.warning(
                "fp8rl guard: token_mult_prob_error is %.4f in this run's first %d steps, so the "
                "guard tightens above %.4g and skips above %.4g. Compare it with the table in "
                "docs/measurements/expect.md; where this is not usual for the model, set "
                "loss_fn.fp8rl_guard.learn_steps=0.",
                statistics.median(self.first),
                len(self.first),
                self.tighten_above,
                self.skip_above,
            )

    def _next(self, error: float, emptied: bool) -> Level:
        asked = "skip" if emptied else self.asks(error)
        self.good = 0 if emptied else self._good_with(error)
        if asked != "skip":
            self.skipped = self.emptied = 0
            return asked
        self.skipped += 1
        self.emptied += emptied
        return "skip" if self.skipped <= self.config.fallback_after else "stop"

    def _good_with(self, error: float) -> int:
        """Good steps in a row, counting one with this error."""
        return self.good + 1 if error < self.release_below else 0

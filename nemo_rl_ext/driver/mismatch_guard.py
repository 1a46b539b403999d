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
LEVELS: tuple[Level, ...] = ("normal", "tight", "skip")
"""By their number in the metric ``guard_level``; a run that stops logs nothing."""
START = 10
"""Steps that say what is usual in a run."""
CLOSEST = 0.02
"""The bound of a tight step is never nearer to 1: steps of one run in BF16 lie at 1.004 to 1.01."""
Bound = Literal["release_below", "tighten_above", "skip_above"]
SHARES: dict[Bound, float] = {"release_below": 5 / 6, "tighten_above": 1.0, "skip_above": 10 / 3}
"""Distance of a bound from 1 by that of ``tighten_above``, as in the defaults."""


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
    start: list[float] = field(default_factory=list)
    """``capped_prob_error`` of the first steps that were trained on."""

    def bound(self, name: Bound) -> float:
        """Return a bound of the configuration, lowered by the first steps of this run."""
        configured: float = getattr(self.config, name)
        times = self.config.times_start
        if times is None or len(self.start) < START:
            return configured
        distance = max(CLOSEST, times * (statistics.median(self.start) - 1))
        return min(configured, 1 + distance * SHARES[name])

    def asks(self, error: float) -> Level:
        """Return ``normal``, ``tight`` or ``skip``, without a change of state.

        Args:
            error: ``capped_prob_error`` of a batch, or of a part of one.
        """
        if not math.isfinite(error) or error > self.bound("skip_above"):
            return "skip"
        if error > self.bound("tighten_above"):
            return "tight"
        released = self._good_with(error) >= self.config.release_after
        return "normal" if self.level == "normal" or released else "tight"

    def observe(self, error: float, *, emptied: bool = False) -> Level:
        """Return the level for the step whose batch has this ``capped_prob_error``.

        Args:
            error: of all tokens of the batch, before any rejection.
            emptied: rejection left nothing to train on, so the step is left out, and counts as one
                whose error is above ``skip_above``.
        """
        before = self.level
        self.level = self._next(error, emptied)
        if self.level != before:
            logger.warning(
                "fp8rl guard: %s -> %s: capped_prob_error is %.4f%s (tighten above %g, skip "
                "above %g; %d skipped, %d good steps in a row).",
                before,
                self.level,
                error,
                " and rejection left no token" if emptied else "",
                self.bound("tighten_above"),
                self.bound("skip_above"),
                self.skipped,
                self.good,
            )
        if len(self.start) < START and self.level in ("normal", "tight"):
            self.start.append(error)
        return self.level

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
        return self.good + 1 if error < self.bound("release_below") else 0

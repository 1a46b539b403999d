"""`MismatchGuard`: tighten the rejection, skip a step, then go back to BF16 rollouts.

Where FP8 rollouts drift away from the trainer, the variance of the correction grows first and the
reward falls later. verl, slime and NeMo RL do not fall back by themselves.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from nemo_rl_ext.config.guard import GuardConfig
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

Level = Literal["normal", "tight", "skip", "bf16", "stop"]
LEVELS: tuple[Level, ...] = ("normal", "tight", "skip", "bf16")
"""By their number in the metric ``guard_level``; a run that stops logs nothing."""


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

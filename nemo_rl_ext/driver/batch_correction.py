"""`BatchCorrection`: corrects each whole batch of a run, in the process that has all of it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext.driver.mismatch_guard import LEVELS, Level, MismatchGuard
from nemo_rl_ext.grpo.importance_sampling import correct, resolve_corrector
from nemo_rl_ext.grpo.log_ratio import token_log_ratio
from nemo_rl_ext.grpo.rejection import RejectionResult, reject
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

WEIGHTS = "fp8rl_is_weights"
"""Key in ``train_data``: float32 ``[B, S]``, the whole batch's importance weights."""


@dataclass
class BatchCorrection:
    """Correction of whole batches.

    Args:
        settings: section ``importance_sampling`` of the recipe.
        guard: or None.
        in_pieces: a step's batch comes in several calls, and :meth:`end_step` follows the last one
            (single controller).
    """

    settings: ImportanceSampling
    guard: MismatchGuard | None = None
    in_pieces: bool = False
    skips: bool = False
    """Whether the step of the last batch is left out, in every pass over it."""
    outgrown: int | None = None
    """KV scales that values of the last calibrated batch have left; None without calibrations."""

    def __post_init__(self) -> None:
        self._corrector = resolve_corrector(self.settings.corrector)
        self._pieces: list[tuple[torch.Tensor, ...]] = []
        """Of each piece of the step: ``rollout``, ``trainer``, ``counts``, ``kept``, ``[B, S - 1]``
        (both engines' logprobs, the tokens that counted, and those left after rejection)."""

    def correct(self, train_data: MutableMapping[str, Any]) -> dict[str, float]:
        """Correct a batch in place and return its metrics.

        ``sample_mask`` loses rejected sequences, ``token_mask`` rejected tokens, and
        :data:`WEIGHTS` is added. Positions are upstream's: column ``t`` of a logprob belongs to
        token ``t``, the first column is empty.

        Args:
            train_data: ``token_mask``, ``prev_logprobs``, ``generation_logprobs`` ``[B, S]``,
                ``sample_mask`` ``[B]``.

        Returns:
            Metrics of :func:`nemo_rl_ext.correct` as ``fp8rl/...``, and the guard's level; empty
            where no token counts.

        Raises:
            BatchError: a counted logprob is NaN.
            UnsupportedError: the guard ends the run.
        """
        token_mask, sample_mask = train_data["token_mask"], train_data["sample_mask"]
        if not self.in_pieces:
            self.skips = False
        counts = (token_mask[:, 1:] * sample_mask.unsqueeze(-1)) != 0
        if not counts.any():
            return {}
        rollout = train_data["generation_logprobs"][:, 1:]
        trainer = train_data["prev_logprobs"][:, 1:]
        result = correct(rollout, trainer, counts, self.settings, self._corrector)
        metrics = dict(result.metrics)
        if self.guard is not None:
            level = self._judge(self.guard, metrics["token_mult_prob_error"])
            metrics |= self._guard_metrics(self.guard, level)
            if level == "tight" and result.mask.any():
                tight = self._reject_tightly(self.guard, rollout, trainer, result.mask)
                metrics["guard_rejected_share"] = tight.metrics["rejected_share"]
                if tight.mask.any():
                    settings = self.settings.model_copy(update={"rejection": None})
                    result = correct(rollout, trainer, tight.mask, settings, self._corrector)
        kept = result.mask
        # A piece may be empty where an earlier one of its step is not.
        if not kept.any() and not any(earlier.any() for *_, earlier in self._pieces):
            logger.warning("fp8rl: every token of the batch was rejected; the step is left out.")
            self.skips = True
        if self.in_pieces:
            self._pieces.append((rollout, trainer, counts, kept))
        if self.skips:
            kept = counts  # the loops cannot take an empty batch
        metrics |= self._step_metrics()
        self._write(train_data, kept, result.weights)
        return _named(metrics)

    def end_step(self) -> tuple[bool, dict[str, float]]:
        """Close a step that came in pieces.

        Returns:
            Whether the step is left out, because the guard decides so for all its tokens or because
            its first piece was rejected as a whole; and the metrics of all its tokens, like those
            of :meth:`correct`, empty where no piece had any.

        Raises:
            UnsupportedError: the guard ends the run.
        """
        metrics: dict[str, float] = {}
        if self._pieces:
            rollout, trainer, counts, kept = self._all_pieces()
            whole = correct(rollout, trainer, counts, self.settings, self._corrector)
            metrics = dict(whole.metrics)
            if self.guard is not None:
                level = self._observe(self.guard, metrics["token_mult_prob_error"])
                metrics |= self._guard_metrics(self.guard, level)
                dropped = float((whole.mask & ~kept).sum())
                metrics["guard_rejected_share"] = dropped / max(float(whole.mask.sum()), 1.0)
            metrics |= self._step_metrics()
        self._pieces.clear()
        skips, self.skips = self.skips, False
        return skips, _named(metrics)

    def _all_pieces(self) -> list[torch.Tensor]:
        """Concatenate the pieces of the step, each padded to the longest one."""
        length = max(rollout.shape[1] for rollout, *_ in self._pieces)
        return [
            torch.cat([pad(part, (0, length - part.shape[1])) for part in parts])
            for parts in zip(*self._pieces, strict=True)
        ]

    def _step_metrics(self) -> dict[str, float]:
        metrics = {"step_skipped": float(self.skips)}
        return metrics if self.outgrown is None else metrics | {"kv_scales_outgrown": self.outgrown}

    @staticmethod
    def _guard_metrics(guard: MismatchGuard, level: Level) -> dict[str, float]:
        return {
            "guard_level": float(LEVELS.index(level)),
            "guard_bf16_rollouts": float(guard.bf16),
        }

    def _judge(self, guard: MismatchGuard, error: float) -> Level:
        """Return the guard's level for a batch or for a piece of one."""
        if not self.in_pieces:
            return self._observe(guard, error)
        return (
            "normal" if guard.level == "normal" and error <= guard.config.tighten_above else "tight"
        )

    def _observe(self, guard: MismatchGuard, error: float) -> Level:
        level = guard.observe(error)
        if level == "stop":
            raise UnsupportedError(self._stop_reason(guard))
        self.skips = self.skips or level in ("skip", "bf16")
        return level

    @staticmethod
    def _stop_reason(guard: MismatchGuard) -> str:
        what = (
            f"token_mult_prob_error was above loss_fn.fp8rl_guard.skip_above="
            f"{guard.config.skip_above} for {guard.skipped} steps in a row"
        )
        if guard.bf16:
            return (
                f"The guard ends the run: {what} with rollouts in BF16, so FP8 rollouts are not "
                "what sets the engines apart; compare their logprobs of one batch."
            )
        return (
            f"The guard gives FP8 rollouts up: {what}; resume the last checkpoint with "
            "rollout=false in the fp8rl block and policy.generation.vllm_cfg.precision=bfloat16, "
            "or with loss_fn.fp8rl_guard.fallback=bf16."
        )

    def _reject_tightly(
        self, guard: MismatchGuard, rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor
    ) -> RejectionResult:
        """Reject sequences by the guard's bounds, whatever corrector the recipe names."""
        bound = guard.config.geometric
        bounds = Rejection(level="geometric", low=1 / bound, high=bound)
        ratio = token_log_ratio(trainer, rollout, mask, "trainer_logprobs - rollout_logprobs")
        return reject(ratio, mask, bounds, self.settings.token_veto)

    @staticmethod
    def _write(
        train_data: MutableMapping[str, Any], kept: torch.Tensor, weights: torch.Tensor
    ) -> None:
        token_mask, sample_mask = train_data["token_mask"], train_data["sample_mask"]
        rows = kept.any(dim=1)
        train_data["sample_mask"] = sample_mask * rows.to(sample_mask.dtype)
        tokens = token_mask.clone()
        # A dropped row keeps its tokens: upstream tells it by its sample mask.
        tokens[:, 1:] *= torch.where(rows[:, None], kept, True).to(tokens.dtype)
        train_data["token_mask"] = tokens
        full = torch.zeros(token_mask.shape, dtype=torch.float32, device=weights.device)
        full[:, 1:] = weights
        train_data[WEIGHTS] = full


def _named(metrics: dict[str, float]) -> dict[str, float]:
    return {f"fp8rl/{name}": float(value) for name, value in metrics.items()}

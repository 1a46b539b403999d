"""`BatchCorrection`: corrects each whole batch of a run, in the process that has all of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext.driver.exactness import count_equal
from nemo_rl_ext.driver.mismatch_guard import LEVELS, MismatchGuard
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
        self._equal = (0, 0)

    def count_equal(self, train_data: Mapping[str, Any]) -> None:
        """Count a piece's tokens of equal log-probabilities, for the metrics of the step."""
        equal, total = count_equal(train_data)
        self._equal = (self._equal[0] + equal, self._equal[1] + total)

    def correct(
        self, train_data: MutableMapping[str, Any], *, masked: float | None = None
    ) -> dict[str, float]:
        """Correct a batch in place and return its metrics.

        ``sample_mask`` loses rejected sequences, ``token_mask`` rejected tokens, and
        :data:`WEIGHTS` is added. Positions are upstream's: column ``t`` of a logprob belongs to
        token ``t``, the first column is empty.

        Args:
            train_data: ``token_mask``, ``prev_logprobs``, ``generation_logprobs`` ``[B, S]``,
                ``sample_mask`` ``[B]``.
            masked: mean error of the sequences that upstream's own threshold has masked before,
                where it has left none; such a step is left out and counts too.

        Returns:
            Metrics of :func:`nemo_rl_ext.correct` as ``fp8rl/...``, and for a whole step the
            guard's level; empty where no token counts.
        """
        token_mask, sample_mask = train_data["token_mask"], train_data["sample_mask"]
        if not self.in_pieces:
            self.skips = False
        counts = (token_mask[:, 1:] * sample_mask.unsqueeze(-1)) != 0
        if not counts.any():
            train_data[WEIGHTS] = torch.zeros_like(token_mask, dtype=torch.float32)
            # The single controller and PPO end a run whose step comes to nothing.
            if masked is None or self.in_pieces:
                return {}
            return _named(self._close(masked, emptied=True) | self._step_metrics())
        rollout = train_data["generation_logprobs"][:, 1:]
        trainer = train_data["prev_logprobs"][:, 1:]
        result = correct(rollout, trainer, counts, self.settings, self._corrector)
        metrics = dict(result.metrics)
        error = metrics["capped_prob_error"]
        kept, weights = result.mask, result.weights
        if self.guard is not None and kept.any() and self._is_tight(self.guard, error):
            tight = self._reject_tightly(self.guard, rollout, trainer, kept)
            metrics["guard_rejected_share"] = tight.metrics["rejected_share"]
            kept, weights = tight.mask, torch.zeros_like(weights)
            if kept.any():
                settings = self.settings.model_copy(update={"rejection": None})
                result = correct(rollout, trainer, kept, settings, self._corrector)
                kept, weights = result.mask, result.weights
        if self.in_pieces:
            # A piece may be empty where an earlier one of its step is not.
            if not kept.any() and not any(earlier.any() for *_, earlier in self._pieces):
                self.skips = True
            self._pieces.append((rollout, trainer, counts, kept))
        else:
            metrics |= self._close(error, emptied=not weights[kept].any())
        if self.skips:
            kept = counts  # the loops cannot take an empty batch
        metrics |= self._step_metrics()
        self._write(train_data, kept, weights)
        return _named(metrics)

    def end_step(self) -> tuple[bool, dict[str, float]]:
        """Close a step that has come in pieces.

        Returns:
            Whether the step is left out, because the guard decides so for all its tokens, no token
            has weight, or its first piece was rejected as a whole; and the metrics of all its
            tokens, like those of :meth:`correct`, empty where no piece had any.
        """
        metrics: dict[str, float] = {}
        equal, total = self._equal
        self._equal = (0, 0)
        if self._pieces:
            rollout, trainer, counts, kept = self._all_pieces()
            whole = correct(rollout, trainer, counts, self.settings, self._corrector)
            metrics = dict(whole.metrics)
            emptied = self.skips or not whole.weights[kept].any()
            metrics |= self._close(metrics["capped_prob_error"], emptied=emptied)
            if self.guard is not None:
                dropped = float((whole.mask & ~kept).sum())
                metrics["guard_rejected_share"] = dropped / max(float(whole.mask.sum()), 1.0)
            metrics |= self._step_metrics()
        if total:
            metrics["equal_logprobs"] = equal / total
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

    def _is_tight(self, guard: MismatchGuard, error: float) -> bool:
        """Tell whether the guard's bounds hold for a batch.

        A piece of one may ask for more by itself, and its step may stay all the same."""
        asked = guard.asks(error)
        return asked == "tight" or (self.in_pieces and asked == "skip")

    def _close(self, error: float, *, emptied: bool) -> dict[str, float]:
        """Decide whether the step is left out, and return the guard's metrics."""
        if emptied:
            self.skips = True
            logger.warning(
                "fp8rl: every token of the batch was rejected or has weight 0; the step is left "
                "out.%s",
                ""
                if self.guard is not None
                else " Should this go on, widen the bounds of loss_fn.fp8rl.importance_sampling; "
                "with loss_fn.fp8rl_guard such steps do not go on for ever.",
            )
        if self.guard is None:
            return {}
        level = self.guard.observe(error, emptied=emptied)
        if level == "stop":
            raise UnsupportedError(self._stop_reason(self.guard))
        self.skips = self.skips or level == "skip"
        return {"guard_level": float(LEVELS.index(level))}

    @staticmethod
    def _stop_reason(guard: MismatchGuard) -> str:
        far, emptied = guard.skipped - guard.emptied, guard.emptied
        reasons, widen = [], ""
        if far:
            bound, configured = guard.bound("skip_above"), guard.config.skip_above
            lowered = ""
            if bound < configured:
                lowered = (
                    f"{bound:g}, to which loss_fn.fp8rl_guard.times_start lowers (null keeps) "
                )
            reasons.append(
                f"capped_prob_error was above {lowered}loss_fn.fp8rl_guard.skip_above="
                f"{configured:g} in {far}"
            )
        if emptied:
            reasons.append(f"rejection left no token with a weight in {emptied}")
            widen = (
                " Or widen what rejects: the bounds of loss_fn.fp8rl.importance_sampling, or "
                "loss_fn.fp8rl_guard.geometric."
            )
        what = f"{guard.skipped} steps in a row were left out ({' and '.join(reasons)})"
        if guard.bf16:
            return (
                f"The guard ends the run: {what} with rollouts in BF16, so FP8 rollouts are not "
                f"what sets the engines apart; compare their logprobs of one batch.{widen}"
            )
        return (
            f"The guard gives FP8 rollouts up: {what}; resume the last checkpoint with "
            "rollout=false in the fp8rl block and policy.generation.vllm_cfg.precision=bfloat16."
            f"{widen}"
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

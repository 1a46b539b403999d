"""Clipped policy losses (GRPO, GSPO, CISPO), corrected for the policy that sampled the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fp8rl import PluginManager
from fp8rl.errors import BatchError, RecipeError
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext.grpo.importance_sampling import Correction, correct, resolve_corrector
from nemo_rl_ext.grpo.log_ratio import (
    SATURATION,
    bounded_exp,
    bounded_k3,
    check_batch,
    check_shapes,
    check_tensors,
    counted,
    reduce_level,
    refuse,
    token_log_ratio,
)


class GRPOConfig(BaseModel):
    """Settings of :class:`GRPOLoss`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss_mode: Literal["ppo", "gspo", "gspo_token", "cispo"] = "ppo"
    """The policy term. ``ppo``: token ratios, clipped (PPO, GRPO, DAPO). ``gspo``: one ratio for
    each sequence, the geometric mean of its tokens' (GSPO, arXiv 2507.18071). ``gspo_token``: the
    same value, with the gradient and the advantage of each token (same paper). ``cispo``: logprobs
    weighted by clipped, detached token ratios (MiniMax-M1, arXiv 2506.13585)."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio current / old gains nothing below ``1 - clip_low`` (PPO, arXiv 1707.06347). GSPO's
    authors use 3e-4 here and 4e-4 for ``clip_high``; CISPO's no lower bound, which is 1."""
    clip_high: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 0.2
    """Nor above ``1 + clip_high``; DAPO (arXiv 2503.14476) sets it above ``clip_low``."""
    dual_clip: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """Largest ratio that a negative advantage is multiplied with (dual-clip PPO, arXiv
    1912.09729); 3 is usual."""
    kl_coefficient: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Weight of KL(current || reference), by the k3 estimator (GRPO, arXiv 2402.03300, eq. 4)."""
    loss_aggregation: Literal["token", "sequence"] = "token"
    """``token``: each token has one weight (DAPO, arXiv 2503.14476); with a constant
    ``normalizer`` it is Dr. GRPO (arXiv 2503.20783). ``sequence``: each sequence has one weight,
    spread over its tokens (GRPO, arXiv 2402.03300); GSPO needs it."""

    @model_validator(mode="after")
    def _compatible(self) -> GRPOConfig:
        if self.loss_mode in ("gspo", "gspo_token") and self.loss_aggregation != "sequence":
            raise ValueError(
                f"loss_mode '{self.loss_mode}' clips whole sequences, so each must have one "
                "weight; set loss_aggregation to 'sequence'"
            )
        if self.loss_mode == "cispo" and self.dual_clip is not None:
            raise ValueError(
                "loss_mode 'cispo' already bounds the weight of negative advantages by clip_high; "
                "remove dual_clip"
            )
        return self


class GRPOLoss:
    """Clipped policy loss of GRPO, GSPO or CISPO with importance-sampling correction.

    With ``r = current / old`` the trainer's own ratio, ``A`` the advantage, ``w`` the weight of
    old / rollout (detached) and ``x = log reference - log current``, a kept token contributes::

        w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) + kl_coefficient * (e^x - 1 - x)

    where with ``dual_clip = c`` a negative ``A`` contributes at most ``-A c`` before ``w``. By
    ``loss_mode``, ``r`` is

    - ``ppo``: the token's ratio;
    - ``gspo``: the sequence's ratio ``s``, the geometric mean over its kept tokens;
    - ``gspo_token``: ``detach(s) * current / detach(current)``;

    and ``cispo`` replaces the ``max``, with the token's ratio, by
    ``-A detach(clip(r, 1 - clip_low, 1 + clip_high)) log current``, so that clipped tokens go on
    giving a gradient.

    The loss is the sum over tokens divided by their number (``token``), or the sum over sequences
    of their tokens' mean divided by the number of sequences (``sequence``); what rejection drops is
    in neither sum nor number. Ratios are float32, and log ratios are clamped to plus or minus
    ``importance_sampling.log_ratio_clamp`` before ``exp``; outside they give no gradient, but where
    the ratio is detached.

    To split a batch into micro-batches of whole rows, correct it once and normalise by the whole
    batch, so that gradients add up to those of the whole batch::

        correction = loss_fn.correct(rollout_logprobs, old_logprobs, mask)
        normalizer = loss_fn.normalizer(correction.mask)
        for rows in micro_batches:
            loss, part = loss_fn(..., correction=correction.rows(rows), normalizer=normalizer)
            loss.backward()
        metrics = {**correction.metrics, **merge_metrics(parts)}

    The same holds for data-parallel ranks whose gradients are summed: add up their normalizers, and
    with ``self_normalize`` correct the logprobs gathered from all of them.

    Args:
        config: clipping, KL and aggregation.
        importance_sampling: section of the recipe.
        plugins: where to look for ``importance_sampling.corrector``; by default all installed.

    Raises:
        RecipeError: the corrector is not known, or an argument is of another class.
    """

    def __init__(
        self,
        config: GRPOConfig,
        importance_sampling: ImportanceSampling,
        plugins: PluginManager | None = None,
    ) -> None:
        for name, given, kind in (
            ("config", config, GRPOConfig),
            ("importance_sampling", importance_sampling, ImportanceSampling),
        ):
            if not isinstance(given, kind):
                raise RecipeError(
                    f"{name} of GRPOLoss must be of {kind.__name__}, not {type(given).__name__}."
                )
        self.config = config
        self.importance_sampling = importance_sampling
        self._corrector = resolve_corrector(importance_sampling.corrector, plugins)

    def correct(
        self, rollout_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> Correction:
        """Return weights and mask of a whole batch, all ``[B, T]``, by the recipe's corrector.

        See :func:`nemo_rl_ext.grpo.importance_sampling.correct`, also for the errors raised.
        """
        return correct(
            rollout_logprobs, old_logprobs, mask, self.importance_sampling, self._corrector
        )

    def normalizer(self, mask: torch.Tensor) -> int:
        """Return what the loss of a batch is divided by: its kept tokens, or sequences with any.

        Args:
            mask: ``[B, T]`` after rejection (``Correction.mask``); for several ranks, add up what
                each one gives.
        """
        check_shapes(mask=mask)
        keep = mask != 0
        if self.config.loss_aggregation == "sequence":
            keep = keep.any(dim=1)
        return int(keep.sum())

    def __call__(
        self,
        current_logprobs: torch.Tensor,
        old_logprobs: torch.Tensor,
        rollout_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        reference_logprobs: torch.Tensor | None = None,
        *,
        correction: Correction | None = None,
        normalizer: float | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Loss of a batch or micro-batch.

        Args:
            current_logprobs: ``[B, T]``, any float dtype, with gradient.
            old_logprobs: ``[B, T]``: the trainer's policy before this batch's first update.
            rollout_logprobs: ``[B, T]``: the policy that sampled.
            advantages: ``[B]`` or ``[B, T]``; mode ``gspo`` takes one value for each sequence.
            mask: ``[B, T]``, nonzero where a token counts; other places may hold anything.
            reference_logprobs: ``[B, T]``; needed with a ``kl_coefficient`` above 0.
            correction: these rows of the whole batch's correction; by default it is made here.
            normalizer: divides the sum, in place of this batch's own :meth:`normalizer`.

        Returns:
            A float32 scalar, exactly 0 with zero gradients where no token is kept; and metrics:
            ``loss``, ``policy_loss`` (without KL), ``loss_tokens``, ``loss_sequences`` (kept);
            over kept tokens ``ratio_mean``, ``ratio_min``, ``ratio_max`` of current / old (of the
            sequence's ratio with GSPO), ``clip_low_share``, ``clip_high_share``,
            ``dual_clip_share`` (the bound decided: it stopped the gradient, but for ``cispo``),
            ``approx_kl`` (k3 of KL(old || current)), ``entropy_proxy``
            (mean of -current), ``advantage_mean`` and ``kl_reference`` (k3); all 0 where no token
            is kept. The metrics of the correction are added if it was made here.

        Raises:
            BatchError: wrong shapes, dtypes or devices, a NaN logprob or an advantage that is not
                finite and counts, likewise a weight of ``correction``, advantages that differ
                inside a sequence in mode ``gspo``, no reference for the KL term, an impossible
                normalizer, a part of a batch that is self-normalised on its own, or a loss beyond
                float32.
        """
        settings = self.importance_sampling
        check_batch(
            mask,
            current_logprobs=current_logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=rollout_logprobs,
        )
        metrics: dict[str, float] = {}
        if correction is None:
            if normalizer is not None and settings.self_normalize:
                raise BatchError(
                    "importance_sampling.self_normalize is a mean over the whole batch; with a "
                    "normalizer, pass the rows of GRPOLoss.correct(...) as 'correction'."
                )
            correction = self.correct(rollout_logprobs, old_logprobs, mask)
            metrics.update(correction.metrics)
        elif not isinstance(correction, Correction):
            raise BatchError(
                f"correction must be rows of what GRPOLoss.correct returns, not "
                f"{type(correction).__name__}."
            )
        check_shapes(mask=mask, correction=correction.mask, weights=correction.weights)

        keep = (mask != 0) & (correction.mask != 0)
        weights = counted(correction.weights.detach(), keep)
        refuse(~weights.isfinite() | (weights < 0), weights, "the importance weight")
        advantage = self._advantages(advantages, keep)
        log_ratio = token_log_ratio(
            current_logprobs, old_logprobs.detach(), keep, "current_logprobs - old_logprobs"
        )
        ratio = self._ratio(log_ratio, keep)
        if self.config.loss_mode == "cispo":
            policy, clipped = self._cispo_terms(ratio, advantage, counted(current_logprobs, keep))
        else:
            policy, clipped = self._policy_terms(ratio, advantage)
        policy_loss = self._aggregate(weights * policy, keep, normalizer)
        loss = policy_loss
        kl = self._reference_kl(current_logprobs, reference_logprobs, keep)
        if kl is not None and self.config.kl_coefficient > 0:
            loss = loss + self.config.kl_coefficient * self._aggregate(kl, keep, normalizer)

        with torch.no_grad():
            means = {
                "ratio_mean": ratio,
                **clipped,
                "approx_kl": bounded_k3(log_ratio, settings.log_ratio_clamp),
                "entropy_proxy": -counted(current_logprobs, keep),
                "advantage_mean": advantage,
            }
            if kl is not None:
                means["kl_reference"] = kl
            metrics.update(_summary(loss, policy_loss, ratio, means, keep))
        if not math.isfinite(metrics["loss"]):
            raise BatchError(
                f"The loss is {metrics['loss']} although all that goes into it is finite (ratios "
                f"up to {metrics['ratio_max']:g}); lower importance_sampling.log_ratio_clamp or "
                "importance_sampling.high."
            )
        return loss, metrics

    def _ratio(self, log_ratio: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Ratio current / old that the loss clips, float32 ``[B, T]``."""
        limit = self.importance_sampling.log_ratio_clamp
        if self.config.loss_mode in ("ppo", "cispo"):
            return bounded_exp(log_ratio, limit)
        mean = reduce_level(log_ratio.clamp(-limit, limit), keep, "geometric")
        if self.config.loss_mode == "gspo_token":
            mean = mean.detach() + (log_ratio - log_ratio.detach())
        return mean.exp()

    def _cispo_terms(
        self, ratio: torch.Tensor, advantage: torch.Tensor, current: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """As :meth:`_policy_terms`; ``current`` are the kept tokens' logprobs, float32."""
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        weight = ratio.detach().clamp(low, high)
        # Minus infinity times an advantage of 0 would be NaN.
        terms = -advantage * weight * current.clamp(min=-SATURATION)
        return terms, {"clip_low_share": ratio < low, "clip_high_share": ratio > high}

    def _policy_terms(
        self, ratio: torch.Tensor, advantage: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of each token before weighting, and where which bound decided."""
        low, high = 1 - self.config.clip_low, 1 + self.config.clip_high
        negative = advantage < 0
        clipped = {
            "clip_low_share": negative & (ratio < low),
            "clip_high_share": (advantage > 0) & (ratio > high),
        }
        terms = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        if self.config.dual_clip is not None:
            bound = -advantage * self.config.dual_clip
            terms = torch.where(negative, torch.minimum(terms, bound), terms)
            clipped["dual_clip_share"] = negative & (ratio > self.config.dual_clip)
        return terms, clipped

    def _reference_kl(
        self, current: torch.Tensor, reference: torch.Tensor | None, keep: torch.Tensor
    ) -> torch.Tensor | None:
        if reference is None:
            if self.config.kl_coefficient > 0:
                raise BatchError(
                    f"kl_coefficient is {self.config.kl_coefficient}, which needs "
                    "reference_logprobs; pass them or set it to 0."
                )
            return None
        check_batch(keep, current_logprobs=current, reference_logprobs=reference)
        x = token_log_ratio(
            reference.detach(), current, keep, "reference_logprobs - current_logprobs"
        )
        return bounded_k3(x, self.importance_sampling.log_ratio_clamp)

    def _aggregate(
        self, terms: torch.Tensor, keep: torch.Tensor, normalizer: float | None
    ) -> torch.Tensor:
        terms = torch.where(keep, terms, 0.0)
        own = self.normalizer(keep)
        if normalizer is None:
            normalizer = own
        if isinstance(normalizer, torch.Tensor) and normalizer.numel() == 1:
            normalizer = normalizer.item()
        if not isinstance(normalizer, Real):
            raise BatchError(f"normalizer must be one number, not {type(normalizer).__name__}.")
        if not math.isfinite(normalizer) or normalizer < 0 or (normalizer == 0 and own > 0):
            raise BatchError(
                f"normalizer is {normalizer} for {own} kept {self.config.loss_aggregation}s; give "
                "the number in the whole batch."
            )
        if self.config.loss_aggregation == "sequence":
            terms = terms.sum(dim=1) / keep.sum(dim=1).clamp(min=1)
        return terms.sum() / (normalizer or 1)

    def _advantages(self, advantages: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        check_tensors(advantages=advantages, mask=keep)
        if advantages.is_complex() or advantages.dtype == torch.bool:
            raise BatchError(f"advantages must be real numbers, not {advantages.dtype}.")
        if advantages.shape == keep.shape[:1]:
            advantages = advantages[:, None].expand_as(keep)
        if advantages.shape != keep.shape:
            raise BatchError(
                f"advantages {tuple(advantages.shape)} must be [B] or [B, T] for a batch of "
                f"{tuple(keep.shape)}."
            )
        advantages = counted(advantages.detach(), keep)
        refuse(~advantages.isfinite(), advantages, "advantages")
        if self.config.loss_mode == "gspo":
            first = advantages.gather(1, keep.int().argmax(dim=1, keepdim=True))
            if ((advantages != first) & keep).any():
                raise BatchError(
                    "loss_mode 'gspo' needs one advantage for each sequence, and these differ "
                    "inside a sequence; set loss_mode to 'gspo_token'."
                )
        return advantages


def merge_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return a batch's metrics from its micro-batches', made with one correction and normalizer.

    ``loss``, ``policy_loss`` and counts add up; ``*_min`` and ``*_max`` are the extremes over parts
    with tokens; all else is the mean weighted by ``loss_tokens``.

    Raises:
        BatchError: a part that is no metrics of :class:`GRPOLoss`, or other ones than the first.
    """
    if not isinstance(parts, Sequence):
        raise BatchError(f"parts must be a list of metrics, not {type(parts).__name__}.")
    if not parts:
        return {}
    for number, part in enumerate(parts):
        if not isinstance(part, Mapping) or "loss_tokens" not in part:
            raise BatchError(
                f"parts[{number}] holds no 'loss_tokens'; give the metrics that GRPOLoss returned "
                "for each micro-batch, in a list."
            )
        if part.keys() != parts[0].keys():
            odd = sorted(part.keys() ^ parts[0].keys())
            raise BatchError(
                f"parts[{number}] and parts[0] differ in {', '.join(odd)}; correct the whole batch "
                "once, and give each micro-batch its rows."
            )
    filled = [p for p in parts if p["loss_tokens"] > 0] or list(parts[:1])
    tokens = sum(p["loss_tokens"] for p in filled)
    merged: dict[str, float] = {}
    for key in parts[0]:
        if key in ("loss", "policy_loss", "loss_tokens", "loss_sequences"):
            merged[key] = sum(p[key] for p in parts)
        elif key.endswith(("_min", "_max")):
            merged[key] = (min if key.endswith("_min") else max)(p[key] for p in filled)
        else:
            merged[key] = sum(p[key] * p["loss_tokens"] for p in filled) / max(tokens, 1)
    return merged


def _summary(
    loss: torch.Tensor,
    policy_loss: torch.Tensor,
    ratio: torch.Tensor,
    means: Mapping[str, torch.Tensor],
    keep: torch.Tensor,
) -> dict[str, float]:
    """Return all metrics of one call, in one transfer to the host."""
    kept_ratio = ratio[keep]
    if kept_ratio.numel():
        low, high = kept_ratio.min(), kept_ratio.max()
    else:
        low = high = ratio.new_zeros(())
    count = keep.sum().clamp(min=1)
    values = {
        "loss": loss,
        "policy_loss": policy_loss,
        "loss_tokens": keep.sum(),
        "loss_sequences": keep.any(dim=1).sum(),
        "ratio_min": low,
        "ratio_max": high,
        **{n: torch.where(keep, v.double(), 0.0).sum() / count for n, v in means.items()},
    }
    stacked = torch.stack([v.detach().double() for v in values.values()])
    return dict(zip(values, stacked.tolist(), strict=True))

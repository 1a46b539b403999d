"""Importance-sampling weights for tokens that another policy than the trainer's has sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from fp8rl import PluginManager
from fp8rl.errors import BatchError, PluginError, RecipeError
from fp8rl.mismatch import MismatchMetrics, mismatch_metrics
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext.grpo.log_ratio import (
    Level,
    bounded_exp,
    check_batch,
    reduce_level,
    token_log_ratio,
)
from nemo_rl_ext.grpo.rejection import reject

_MISMATCH = frozenset(field.name for field in fields(MismatchMetrics))


@dataclass(frozen=True)
class Correction:
    """Weights and mask of one batch, both ``[B, T]`` and without gradient."""

    weights: torch.Tensor
    """float32; 0 wherever ``mask`` is false."""
    mask: torch.Tensor
    """bool: tokens that still count after rejection."""
    metrics: dict[str, float]
    """Of the whole batch, also in a part of it."""

    def rows(self, index: slice | torch.Tensor) -> Correction:
        """Return the part that belongs to a micro-batch of these rows."""
        return Correction(self.weights[index], self.mask[index], self.metrics)


Corrector = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ImportanceSampling], Correction]
"""``(rollout_logprobs, trainer_logprobs, mask, config) -> Correction``; see :func:`correct_is`."""


def correct_is(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: ImportanceSampling,
) -> Correction:
    """Return weights for ``trainer / rollout`` and the mask after rejection: corrector ``is``.

    Let ``d_t`` be the token's log ratio, in float32, clamped to plus or minus
    ``config.log_ratio_clamp``, ``c`` below. The ratio ``rho`` is, by ``config.level``:

    - ``token``: ``exp(d_t)`` (Yao et al., "Your Efficient RL Framework Secretly Brings You
      Off-Policy RL Training", 2025; FlashRL): low variance, biased in the sequence's prefix;
    - ``sequence``: ``exp(clamp(sum_t d_t, -c, c))`` for every token of a sequence: unbiased, with
      a variance that grows with length (Liu, Li et al., "When Speed Kills Stability", 2025);
    - ``geometric``: ``exp(mean_t d_t)``, the length-normalised ratio of GSPO (arXiv 2507.18071).

    The weight is, by ``config.mode``:

    - ``truncate``: ``min(rho, high)``, truncated importance sampling (Ionides, JCGS 17(2), 2008;
      TIS of Yao et al.);
    - ``clip``: ``min(max(rho, low), high)``, as the detached weight of CISPO (MiniMax-M1, arXiv
      2506.13585);
    - ``mask``: ``rho`` inside ``[low, high]``, else 0, IcePop (Ring-1T, arXiv 2510.18855);
      as there, tokens of weight 0 still count in the denominator of the loss;
    - ``off``: 1.

    A ratio too large for float32 takes the largest weight its mode allows, never 0.

    Rejection (:func:`nemo_rl_ext.grpo.rejection.reject`) looks at the ratios, not at the weights,
    and what it drops leaves the mask. With ``config.self_normalize`` the weights are then divided
    by their mean over the kept tokens (level ``token``) or over the kept sequences, each once
    (other levels): self-normalised importance sampling (Owen, "Monte Carlo theory, methods and
    examples", 9.2). They may then exceed ``high``; where nothing is kept, or all weights are 0,
    they stay 0.

    Args:
        rollout_logprobs: ``[B, T]``, any float dtype: logprobs of the policy that sampled.
        trainer_logprobs: ``[B, T]``: the same tokens under the trainer's policy before the update
            (the old, or proximal, policy).
        mask: ``[B, T]``, nonzero where a token counts; other places may hold anything, also NaN.
        config: section ``importance_sampling`` of the recipe.

    Returns:
        Weights, mask, and metrics: those of :class:`fp8rl.mismatch.MismatchMetrics` and of
        :class:`nemo_rl_ext.grpo.rejection.RejectionResult`, and over the kept units (tokens, or
        sequences) ``is_weight_mean``, ``is_weight_min``, ``is_weight_max``, ``is_weight_ess``
        (effective sample size as a share of the units) and ``is_low_share``, ``is_high_share``
        (ratios outside the bounds); these are all 0 where nothing is kept.

    Raises:
        BatchError: shapes or devices differ, something else than float logprobs and a mask, the
            mask is empty, or a counted token's log ratio is NaN.
    """
    check_batch(mask, rollout_logprobs=rollout_logprobs, trainer_logprobs=trainer_logprobs)
    rollout, trainer, counts = rollout_logprobs.detach(), trainer_logprobs.detach(), mask != 0
    if not counts.any():
        raise BatchError("The mask counts no token; a batch needs at least one response token.")
    raw = token_log_ratio(trainer, rollout, counts, "trainer_logprobs - rollout_logprobs")
    limit = config.log_ratio_clamp
    clamped = reduce_level(raw.clamp(-limit, limit), counts, config.level)
    ratio = bounded_exp(clamped, limit)
    rejection = reject(raw, counts, config.rejection, config.token_veto)
    kept = rejection.mask
    weights = torch.where(kept, _weigh(ratio, config), 0.0)
    if config.self_normalize:
        units = _units(weights, kept, config.level)
        mean = units.double().sum() / max(units.numel(), 1)
        weights = torch.where(mean > 0, weights / mean, weights).float()
    metrics = {
        **mismatch_metrics(rollout, trainer, counts).to_dict(),
        **_spread(_units(weights, kept, config.level)),
        **_shares_outside(_units(ratio, kept, config.level), config),
        **rejection.metrics,
    }
    return Correction(weights, kept, metrics)


def correct(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    config: ImportanceSampling,
    corrector: Corrector = correct_is,
) -> Correction:
    """Correct a whole batch with a corrector, and check what it returns.

    Args:
        rollout_logprobs: ``[B, T]``, any float dtype: logprobs of the policy that sampled.
        trainer_logprobs: ``[B, T]``: the same tokens under the trainer's policy before the update.
        mask: ``[B, T]``, nonzero where a token counts; other places may hold anything, also NaN.
        config: section ``importance_sampling`` of the recipe.
        corrector: what :func:`resolve_corrector` finds for ``config.corrector``. Without it the
            built-in one is used, whatever the recipe names.

    Returns:
        Weights, mask and the corrector's metrics. For a plugin's corrector ``is_weight_mean``,
        ``_min``, ``_max`` and ``_ess`` are those of the weights that it returned, and the metrics
        of :class:`fp8rl.mismatch.MismatchMetrics` are added where it does not give them.

    Raises:
        BatchError: as in :func:`correct_is`.
        RecipeError: ``config`` is something else than the section.
        PluginError: a plugin's corrector returns something else than it must: another type, shape,
            dtype or device, a weight that is negative or not finite, a weight other than 0 where
            its mask is false, or a mask that counts more than the batch's.
    """
    if not isinstance(config, ImportanceSampling):
        raise RecipeError(
            "importance_sampling must be the section of a recipe (fp8rl.recipe.ImportanceSampling),"
            f" not {type(config).__name__}."
        )
    if corrector is not correct_is:
        check_batch(mask, rollout_logprobs=rollout_logprobs, trainer_logprobs=trainer_logprobs)
    result = corrector(rollout_logprobs, trainer_logprobs, mask, config)
    if corrector is correct_is:
        return result
    wrong = _what_is_wrong(result, mask)
    if wrong is not None:
        raise PluginError(f"Importance-sampling corrector '{config.corrector}' {wrong}.")
    result = replace(result, weights=result.weights.detach())
    metrics = result.metrics | _spread(_units(result.weights, result.mask, config.level))
    if not metrics.keys() >= _MISMATCH:
        metrics = mismatch_metrics(rollout_logprobs, trainer_logprobs, mask).to_dict() | metrics
    return replace(result, metrics=metrics)


def _what_is_wrong(result: Any, mask: torch.Tensor) -> str | None:
    """Return what a plugin's corrector has returned against its contract, or None."""
    if not isinstance(result, Correction):
        return f"must return a Correction, not {type(result).__name__}"
    weights, kept = result.weights, result.mask
    if not isinstance(weights, torch.Tensor) or not isinstance(kept, torch.Tensor):
        given = " and ".join(type(part).__name__ for part in (weights, kept))
        return f"must return weights and mask as tensors, not {given}"
    if not weights.shape == kept.shape == mask.shape:
        return (
            f"returned weights {tuple(weights.shape)} and mask {tuple(kept.shape)} for a batch of "
            f"{tuple(mask.shape)}"
        )
    if weights.dtype != torch.float32 or kept.dtype != torch.bool:
        return (
            f"must return weights in float32 and a mask in bool, not {weights.dtype} and "
            f"{kept.dtype}; convert them"
        )
    if {weights.device, kept.device} != {mask.device}:
        return f"returned tensors on another device than the batch's {mask.device}"
    for bad, what in (
        (~weights.isfinite() | (weights < 0), "is neither 0 nor a positive finite number"),
        ((weights != 0) & ~kept, "is not 0 although its mask leaves the token out"),
        (kept & (mask == 0), "is of a token that the batch's mask does not count"),
    ):
        if bad.any():
            row, token = bad.nonzero()[0].tolist()
            return (
                f"returned a weight of {weights[row, token].item():g} at row {row}, token {token}, "
                f"which {what} ({int(bad.sum())} such in all)"
            )
    metrics = result.metrics
    if not isinstance(metrics, dict) or not all(
        isinstance(v, int | float) for v in metrics.values()
    ):
        return f"must return metrics as a dict of Python numbers by name, not {metrics!r:.80}"
    return None


def resolve_corrector(name: str, plugins: PluginManager | None = None) -> Corrector:
    """Return the corrector that ``importance_sampling.corrector`` names.

    Args:
        name: ``is`` (:func:`correct_is`), or a name of a plugin's ``register_is_correctors``.
        plugins: where to look; by default all installed plugins.

    Raises:
        RecipeError: no plugin offers the name.
        PluginError: a plugin cannot be loaded, or two offer one name.
    """
    return (plugins or PluginManager()).is_corrector(name)


def _weigh(ratio: torch.Tensor, config: ImportanceSampling) -> torch.Tensor:
    if config.mode == "off":
        return torch.ones_like(ratio)
    if config.mode == "mask":
        assert config.low is not None, "the recipe refuses mode 'mask' without 'low'"
        inside = (ratio >= config.low) & (ratio <= config.high)
        return torch.where(inside, ratio, 0.0)
    # 'low' is None for 'truncate'.
    return ratio.clamp(min=config.low, max=config.high)


def _units(values: torch.Tensor, kept: torch.Tensor, level: Level) -> torch.Tensor:
    """Return one value for each kept token, or for each sequence with a kept token."""
    if level == "token":
        return values[kept]
    first = kept.int().argmax(dim=1, keepdim=True)
    return values.gather(1, first).squeeze(1)[kept.any(dim=1)]


def _shares_outside(units: torch.Tensor, config: ImportanceSampling) -> dict[str, float]:
    """Shares of the ratios of units that are outside the bounds; 0 where there are no units."""
    low = config.low if config.low is not None else 0.0
    outside = torch.stack([units < low, units > config.high]).double()
    shares = outside.sum(dim=1) / max(units.numel(), 1)
    return dict(zip(("is_low_share", "is_high_share"), shares.tolist(), strict=True))


def _spread(weights: torch.Tensor) -> dict[str, float]:
    """Mean, extremes and effective sample size of the weights of units; 0 where there are none."""
    names = ("is_weight_mean", "is_weight_min", "is_weight_max", "is_weight_ess")
    if weights.numel() == 0:
        return dict.fromkeys(names, 0.0)
    w = weights.double()
    square = w.square().sum()
    ess = torch.where(square > 0, w.sum().square() / (w.numel() * square), 0.0)
    values = torch.stack([w.mean(), w.min(), w.max(), ess])
    return dict(zip(names, values.tolist(), strict=True))

"""The mismatch of the rollout engine's policy and the trainer's, on the sampled tokens."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from numbers import Real

import torch

from fp8rl.errors import BatchError

QUANTILES = (0.01, 0.5, 0.99)
CAP = 10.0
"""Most that a token counts in ``capped_prob_error``, 2.3 nats."""


@dataclass(frozen=True)
class MismatchMetrics:
    """Metrics over the counted tokens; ``log_ratio`` is trainer minus rollout logprob, in nats.

    KL(rollout, trainer) is estimated in three ways (Schulman, "Approximating KL divergence").
    """

    tokens: int
    """Number of tokens compared."""
    token_mult_prob_error: float
    """Mean of exp(abs(log_ratio)); 1 is perfect (NeMo RL ``token_mult_prob_error``)."""
    capped_prob_error: float
    """Mean of min(exp(abs(log_ratio)), 10), which one token far off cannot raise much; infinite if
    a log_ratio is."""
    kl_k1: float
    """KL(rollout, trainer) estimated as the mean of -log_ratio."""
    kl_k2: float
    """KL(rollout, trainer) estimated as the mean of log_ratio^2 / 2."""
    kl_k3: float
    """KL(rollout, trainer) estimated as the mean of exp(log_ratio) - 1 - log_ratio."""
    chi_square: float
    """Mean of ratio^2 - 1: variance of the importance weights (verl ``rollout_is chi2``)."""
    ess: float
    """Effective sample size of the token weights as a share of the tokens, in (0, 1]."""
    ppl_rollout: float
    """Perplexity of the tokens under the rollout engine."""
    ppl_trainer: float
    """Perplexity of the tokens under the trainer."""
    ppl_gap: float
    """log ppl_trainer - log ppl_rollout, in nats."""
    log_ratio_q01: float
    """1 % quantile of log_ratio."""
    log_ratio_q50: float
    """Median of log_ratio."""
    log_ratio_q99: float
    """99 % quantile of log_ratio."""
    share_low: float
    """Share of tokens with a ratio below ``low``."""
    share_high: float
    """Share of tokens with a ratio above ``high``."""

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def mismatch_metrics(
    rollout_logprobs: torch.Tensor,
    trainer_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> MismatchMetrics:
    """Compare both engines' logprobs of the same tokens.

    Args:
        rollout_logprobs: float, any shape; logprobs under the policy that sampled.
        trainer_logprobs: logprobs under the trainer's policy; same shape and device.
        mask: same shape, nonzero where the token counts; other values are never read, so that
            padding may hold NaN.
        low: ratio below which a token counts in ``share_low``.
        high: ratio above which a token counts in ``share_high``.

    Returns:
        The metrics, summed in float64 on the tensors' device with one transfer to the host. A NaN
        logprob of a counted token makes every metric NaN, except the number of tokens.

    Raises:
        BatchError: shapes differ, the mask is empty, logprobs are no floating-point tensors, or
            ``low`` and ``high`` are no bounds.
    """
    _check_tensor("rollout_logprobs", rollout_logprobs, floating=True)
    _check_tensor("trainer_logprobs", trainer_logprobs, floating=True)
    _check_tensor("mask", mask, floating=False)
    if not (isinstance(low, Real) and isinstance(high, Real) and low <= high):
        raise BatchError(
            f"low={low!r} and high={high!r} are no bounds of a ratio; let low <= high."
        )
    if not rollout_logprobs.shape == trainer_logprobs.shape == mask.shape:
        raise BatchError(
            f"rollout_logprobs {tuple(rollout_logprobs.shape)}, trainer_logprobs "
            f"{tuple(trainer_logprobs.shape)} and mask {tuple(mask.shape)} must have one shape."
        )
    keep = mask != 0
    rollout = rollout_logprobs.detach()[keep].double()
    trainer = trainer_logprobs.detach()[keep].double()
    n = rollout.numel()
    if n == 0:
        raise BatchError("The mask selects no token; there is nothing to compare.")
    log_ratio = trainer - rollout
    ratio = log_ratio.exp()
    # The ESS does not change with a common factor; this one keeps its squares finite.
    weight = (log_ratio - log_ratio.max()).exp()
    error = log_ratio.abs().exp()
    # A policy that rules a sampled token out is no mismatch that a cap may hide.
    capped = torch.where(log_ratio.isinf().any(), torch.inf, error.clamp(max=CAP).mean())
    levels = torch.tensor(QUANTILES, dtype=torch.float64, device=log_ratio.device)
    packed = torch.stack(
        [
            error.mean(),
            capped,
            -log_ratio.mean(),
            log_ratio.square().mean() / 2,
            (torch.expm1(log_ratio) - log_ratio).mean(),
            ratio.square().mean() - 1,
            weight.sum().square() / (n * weight.square().sum()),
            (-rollout.mean()).exp(),
            (-trainer.mean()).exp(),
            rollout.mean() - trainer.mean(),
            *_quantiles(log_ratio, levels),
            (ratio < low).double().mean(),
            (ratio > high).double().mean(),
        ]
    )
    packed = torch.where(log_ratio.isnan().any(), torch.nan, packed)
    return MismatchMetrics(n, *packed.tolist())


def _check_tensor(name: str, given: torch.Tensor, *, floating: bool) -> None:
    dense = isinstance(given, torch.Tensor) and given.layout is torch.strided
    if not dense or given.is_meta:
        raise BatchError(
            f"{name} is a {type(given).__name__} without dense values; give a torch.Tensor."
        )
    if floating and not given.is_floating_point():
        raise BatchError(
            f"{name} came in {given.dtype}; give log-probabilities in a floating-point dtype."
        )


def _quantiles(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Linear-interpolation quantiles; torch.quantile refuses more than 16M elements."""
    ordered = x.sort().values
    position = levels * (x.numel() - 1)
    below = position.floor().long()
    above = position.ceil().long()
    return torch.lerp(ordered[below], ordered[above], position - below)

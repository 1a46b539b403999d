"""Rejection of tokens and sequences that the trainer's policy would hardly have sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch

from fp8rl.errors import BatchError, RecipeError
from fp8rl.recipe import Rejection
from nemo_rl_ext.grpo.log_ratio import check_shapes, counted, reduce_level, refuse


@dataclass(frozen=True)
class RejectionResult:
    """What is left of a batch.

    ``metrics`` are shares of the tokens that counted before, by reason (one token may have more
    than one): ``rejected_low_share``, ``rejected_high_share``, ``rejected_veto_share``, and for
    any reason ``rejected_share``; ``rejected_sequence_share`` is the share of sequences left with
    no token, ``all_rejected`` is 1.0 where nothing is left at all.
    """

    mask: torch.Tensor
    """bool ``[B, T]``: tokens that still count."""
    metrics: dict[str, float]


def reject(
    log_ratio: torch.Tensor,
    mask: torch.Tensor,
    rejection: Rejection | None = None,
    token_veto: float | None = None,
) -> RejectionResult:
    """Drop tokens or sequences by the ratio trainer / rollout, whatever their weight is.

    A bound drops what lies outside ``[low, high]`` (both ends stay):

    - ``token``: each token by its own ratio; the masking of IcePop (arXiv 2510.18855), but
      dropped tokens leave the denominator of the loss as well;
    - ``sequence``: whole sequences by the product of their ratios, masked importance sampling
      (Liu, Li et al., "When Speed Kills Stability", 2025);
    - ``geometric``: whole sequences by the geometric mean of their ratios, which does not punish
      length (same source; the ratio is that of GSPO, arXiv 2507.18071).

    The veto drops a whole sequence when any one of its ratios is below ``token_veto``: one token
    that the trainer holds to be impossible spoils what follows it (same source; slime, verl).

    Bounds are compared in log space on ratios that no clamp has touched.

    Args:
        log_ratio: float ``[B, T]``; other places than those of ``mask`` may hold anything.
        mask: bool ``[B, T]``.
        rejection: level and bounds, or None.
        token_veto: smallest ratio a sequence may hold, or None.

    Raises:
        BatchError: other shapes or dtypes, a NaN that counts, or an impossible ``token_veto``.
        RecipeError: ``rejection`` is something else than the section.
    """
    check_shapes(log_ratio=log_ratio, mask=mask)
    if not log_ratio.is_floating_point() or mask.dtype != torch.bool:
        raise BatchError(
            f"log_ratio must be floating-point numbers and mask bool, not {log_ratio.dtype} and "
            f"{mask.dtype}."
        )
    log_ratio = counted(log_ratio, mask)
    refuse(log_ratio.isnan(), log_ratio, "log_ratio")
    if not isinstance(rejection, Rejection | None):
        raise RecipeError(
            f"rejection must be a section of a recipe (fp8rl.recipe.Rejection), not "
            f"{type(rejection).__name__}."
        )
    if token_veto is not None and not (isinstance(token_veto, Real) and token_veto > 0):
        raise BatchError(f"token_veto is {token_veto!r}; give a ratio above 0, or None.")
    low = high = veto = torch.zeros_like(mask)
    if rejection is not None:
        value = reduce_level(log_ratio, mask, rejection.level)
        if rejection.low is not None:
            low = mask & (value < math.log(rejection.low))
        if rejection.high is not None:
            high = mask & (value > math.log(rejection.high))
    if token_veto is not None:
        veto = mask & (mask & (log_ratio < math.log(token_veto))).any(dim=1, keepdim=True)
    kept = mask & ~(low | high | veto)
    parts = [mask, kept, low, high, veto, mask.any(dim=1), kept.any(dim=1)]
    tokens, left, n_low, n_high, n_veto, rows, rows_left = torch.stack(
        [part.sum() for part in parts]
    ).tolist()
    of_tokens = 1 / max(tokens, 1)
    metrics = {
        "rejected_share": (tokens - left) * of_tokens,
        "rejected_low_share": n_low * of_tokens,
        "rejected_high_share": n_high * of_tokens,
        "rejected_veto_share": n_veto * of_tokens,
        "rejected_sequence_share": (rows - rows_left) / max(rows, 1),
        "all_rejected": float(tokens > 0 and left == 0),
    }
    return RejectionResult(kept, metrics)

"""Importance weights, rejection and losses of GRPO, GSPO and CISPO in float64, with their metrics.

The formulas are those of the papers, over batches of any logprobs; gradients are autograd's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st

from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext.grpo.log_ratio import SATURATION
from nemo_rl_ext.grpo.loss import GRPOConfig

LEVELS = ("token", "sequence", "geometric")
WEIGHTING = ("truncate", "clip", "mask", "off")
LOSSES = ("ppo", "gspo", "gspo_token", "cispo")


@dataclass
class Batch:
    """Float32 logprobs and a mask, ``[B, T]``; what the mask leaves out may be anything."""

    current: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    reference: torch.Tensor

    def args(self, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """Arguments of ``GRPOLoss``."""
        parts = (self.current, self.old, self.rollout, self.advantages, self.mask, self.reference)
        return tuple(part[rows] for part in parts)


def make(seed: int, rows: int, columns: int, density: float = 0.75, spread: float = 0.3) -> Batch:
    """Make a random batch; ``spread``: of the rollout's logprobs around the trainer's, in nats."""
    g = torch.Generator().manual_seed(seed)

    def near(x: torch.Tensor, far: float = 0.3) -> torch.Tensor:
        return x + far * torch.randn(rows, columns, generator=g)

    old = -2 * torch.rand(rows, columns, generator=g)
    return Batch(
        near(old).requires_grad_(),
        old,
        near(old, spread),
        torch.randn(rows, generator=g),
        torch.rand(rows, columns, generator=g) < density,
        near(old),
    )


def batches(*spreads: float) -> st.SearchStrategy[Batch]:
    return st.builds(
        make,
        seed=st.integers(0, 2**31),
        rows=st.integers(1, 5),
        columns=st.integers(1, 6),
        density=st.sampled_from([0.3, 0.8, 1.1]),
        spread=st.sampled_from(spreads),
    )


bounds = st.sampled_from((1e-4, 0.5, 0.9, 0.999))


@st.composite
def correctors(draw: st.DrawFn, mode: str | None = None) -> ImportanceSampling:
    mode = mode or draw(st.sampled_from(WEIGHTING))
    rejection = None
    if draw(st.booleans()):
        low, high = draw(bounds | st.none()), draw(st.sampled_from((1.001, 1.4, 2.0, 1e4)))
        rejection = Rejection(level=draw(st.sampled_from(LEVELS)), low=low, high=high)
    return ImportanceSampling(
        level=draw(st.sampled_from(LEVELS)),
        mode=mode,
        low=draw(bounds) if mode in ("clip", "mask") else None,
        high=draw(st.sampled_from((1.1, 1.7, 2.0, 1e6))),
        self_normalize=draw(st.booleans()),
        log_ratio_clamp=draw(st.sampled_from((1.0, 20.0, 88.0))),
        rejection=rejection,
        token_veto=draw(st.sampled_from((None, 1e-4, 0.4))),
    )


@st.composite
def losses(draw: st.DrawFn, mode: str | None = None) -> GRPOConfig:
    mode = mode or draw(st.sampled_from(LOSSES))
    aggregation = "sequence" if "gspo" in mode else draw(st.sampled_from(("token", "sequence")))
    return GRPOConfig(
        loss_mode=mode,
        clip_low=draw(st.sampled_from((0.05, 0.2, 1.0))),
        clip_high=draw(st.sampled_from((0.08, 0.3, 5.0))),
        dual_clip=None if mode == "cispo" else draw(st.sampled_from((None, 1.1, 1.5))),
        kl_coefficient=draw(st.sampled_from((0.0, 0.3))),
        loss_aggregation=aggregation,
    )


def difference(numerator: torch.Tensor, denominator: torch.Tensor, mask: torch.Tensor):
    """Log ratio, 0 outside of the mask; NaN where two infinities meet."""
    parts = (torch.where(mask, x.double(), 0.0) for x in (numerator, denominator))
    found = next(parts) - next(parts)
    return found.clamp(-SATURATION, SATURATION)


def of_level(log_ratio: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    if level == "token":
        return log_ratio
    total = log_ratio.sum(1, keepdim=True)
    if level == "geometric":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return total.expand_as(log_ratio)


def no_tie(values: torch.Tensor, *ratios: float | None) -> None:
    """Leave out what float32 cannot tell apart from a bound."""
    for bound in (math.log(ratio) for ratio in ratios if ratio):
        if ((values - bound).abs() < 1e-4 * (1 + abs(bound))).any():
            assume(False)


class Corrected(NamedTuple):
    weights: torch.Tensor
    kept: torch.Tensor
    metrics: dict[str, float]


def corrected(b: Batch, c: ImportanceSampling) -> Corrected:
    """Weights, kept mask and metrics, by the docstrings of ``correct`` and ``reject``."""
    raw = difference(b.old, b.rollout, b.mask)
    limit = c.log_ratio_clamp
    value = of_level(raw.clamp(-limit, limit), b.mask, c.level).clamp(-limit, limit)
    ratio = value.exp()
    no_tie(value[b.mask], c.low, c.high)
    low = high = veto = torch.zeros_like(b.mask)
    if c.rejection is not None:
        unit = of_level(raw, b.mask, c.rejection.level)
        no_tie(unit[b.mask], c.rejection.low, c.rejection.high)
        if c.rejection.low is not None:
            low = b.mask & (unit < math.log(c.rejection.low))
        if c.rejection.high is not None:
            high = b.mask & (unit > math.log(c.rejection.high))
    if c.token_veto is not None:
        no_tie(raw[b.mask], c.token_veto)
        impossible = b.mask & (raw < math.log(c.token_veto))
        veto = b.mask & impossible.any(1, keepdim=True)
    kept = b.mask & ~(low | high | veto)
    weights = {
        "truncate": ratio.clamp(max=c.high),
        "clip": ratio.clamp(c.low, c.high),
        "mask": torch.where((ratio >= (c.low or 0)) & (ratio <= c.high), ratio, 0.0),
        "off": torch.ones_like(ratio),
    }[c.mode]
    weights = torch.where(kept, weights, 0.0)

    def units(x: torch.Tensor) -> torch.Tensor:
        """One value of each token, or of each sequence, that is kept."""
        if c.level == "token":
            return x[kept]
        rows = [row[k][0] for row, k in zip(x, kept, strict=True) if k.any()]
        return torch.stack(rows) if rows else x.new_zeros(0)

    mean = units(weights).mean() if kept.any() else 0.0
    if c.self_normalize and mean > 0:
        weights = weights / mean
    tokens, rows = int(b.mask.sum()), int(b.mask.any(1).sum())
    reasons = {"low": low, "high": high, "veto": veto}
    metrics = {f"rejected_{why}_share": float(x.sum()) / tokens for why, x in reasons.items()}
    metrics["rejected_share"] = (tokens - int(kept.sum())) / tokens
    metrics["rejected_sequence_share"] = (rows - int(kept.any(1).sum())) / rows
    metrics["all_rejected"] = float(not kept.any())
    if kept.any():
        w, r = units(weights), units(ratio)
        metrics |= {"is_weight_mean": w.mean().item(), "is_weight_min": w.min().item()}
        metrics |= {"is_weight_max": w.max().item()}
        square = (w**2).mean().item()
        metrics["is_weight_ess"] = w.mean().item() ** 2 / square if square > 0 else 0.0
        metrics["is_low_share"] = (r < (c.low or 0)).double().mean().item()
        metrics["is_high_share"] = (r > c.high).double().mean().item()
    return Corrected(weights, kept, metrics)


class Lost(NamedTuple):
    loss: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, float]
    size: float
    """Sum of the terms' magnitudes."""
    largest: float
    """Largest number on the way."""


def loss_of(b: Batch, limit: float, g: GRPOConfig, weights: torch.Tensor, kept: torch.Tensor):
    """GRPO of arXiv 2402.03300, GSPO and GSPO-token of 2507.18071, CISPO of 2506.13585."""
    leaf = torch.where(kept, b.current.detach().double(), 0.0).requires_grad_()
    moved = difference(leaf, b.old, kept)
    ratio = moved.clamp(-limit, limit).exp()
    if "gspo" in g.loss_mode:
        ratio = of_level(moved.clamp(-limit, limit), kept, "geometric").exp()
    if g.loss_mode == "gspo_token":  # the paper's s_i,t
        ratio = ratio.detach() * (moved - moved.detach()).exp()
    low, high = 1 - g.clip_low, 1 + g.clip_high
    no_tie(ratio[kept].detach().log(), low, high, g.dual_clip)
    a = torch.broadcast_to(b.advantages.double()[:, None], ratio.shape)
    objective = torch.minimum(ratio * a, ratio.clip(low, high) * a)
    if g.dual_clip is not None:
        objective = torch.where(a < 0, torch.maximum(objective, g.dual_clip * a), objective)
    if g.loss_mode == "cispo":
        objective = ratio.clip(low, high).detach() * a * leaf.clamp(min=-SATURATION)
    x = difference(b.reference, leaf, kept).clamp(-limit, limit)
    k3 = torch.expm1(x) - x
    share = torch.where(kept, 1 / kept.sum().clamp(min=1).double(), 0.0)
    if g.loss_aggregation == "sequence":
        each = kept.sum(1, keepdim=True) * kept.any(1).sum()
        share = torch.where(kept, 1 / each.clamp(min=1).double(), 0.0)
    terms = torch.where(kept, -weights.double() * objective, 0.0)
    loss = (share * terms).sum() + g.kl_coefficient * (share * k3).sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    with torch.no_grad():
        negative, mean = a < 0, kept.double() / kept.sum().clamp(min=1)
        of_means = {
            "ratio_mean": ratio,
            "clip_low_share": negative & (ratio < low),
            "clip_high_share": (a > 0) & (ratio > high),
            "approx_kl": moved.clamp(-limit, limit).expm1() - moved.clamp(-limit, limit),
            "entropy_proxy": -leaf,
            "kl_reference": k3,
        }
        if g.loss_mode == "cispo":
            of_means |= {"clip_low_share": ratio < low, "clip_high_share": ratio > high}
        if g.dual_clip is not None:
            of_means["dual_clip_share"] = negative & (ratio > g.dual_clip)
        metrics = {name: float((mean * x).sum()) for name, x in of_means.items()}
        metrics |= {"loss": loss.item(), "policy_loss": float((share * terms).sum())}
        metrics |= {"loss_tokens": kept.sum().item(), "loss_sequences": kept.any(1).sum().item()}
        # k3 loses digits near 0.
        size = share * (terms.abs() + g.kl_coefficient * (k3 + 2.0**-12 * x.abs()))
        steps = ((ratio * a)[kept].abs().max() if kept.any() else terms.sum(), terms.abs().sum())
        largest = max(*map(float, steps), float(k3.sum()))
    return Lost(loss.detach(), gradient, metrics, float(size.sum()), largest)

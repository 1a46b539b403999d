"""Importance weights, rejection and loss of any logprobs, against float64 formulas in numpy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl import PluginManager
from fp8rl.errors import BatchError
from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.importance_sampling import correct
from nemo_rl_ext.grpo.log_ratio import SATURATION
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss

LARGEST = float(np.finfo(np.float32).max)

PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)
Array = np.ndarray

ordinary = st.floats(-12.0, 0.0, width=32)
extreme = st.sampled_from((-math.inf, -1e30, -3e38, -1e-30, -0.0, 0.0, -88.0, -89.0, -1e4, 88.5))
never_read = st.sampled_from((math.nan, math.inf, -math.inf, 1e30, 7.0))


@dataclass
class Batch:
    """Float32 ``[B, T]``; what the mask leaves out may be anything."""

    mask: Array
    logprobs: dict[str, Array]
    advantages: Array


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    mask = np.array(
        [[draw(st.booleans()) for _ in range(columns)] for _ in range(rows)], dtype=bool
    )
    logprobs = {}
    for name in ("rollout", "old", "current", "reference"):
        counted = draw(st.sampled_from((ordinary, st.one_of(ordinary, extreme))))
        values = [[draw(counted if m else never_read) for m in row] for row in mask]
        logprobs[name] = np.array(values, dtype=np.float32)
    advantages = np.array(
        [draw(st.one_of(st.floats(-3, 3, width=32), st.sampled_from((0.0, -1e3, 1e3))))
         for _ in range(rows)],
        dtype=np.float32,
    )  # fmt: skip
    return Batch(mask, logprobs, advantages)


bounds = st.sampled_from((1e-4, 0.5, 0.9, 0.999))
correctors = st.builds(
    lambda level, mode, low, high, normalize, clamp, rejection, veto: ImportanceSampling(
        level=level,
        mode=mode,
        low=low if mode in ("clip", "mask") else None,
        high=high,
        self_normalize=normalize,
        log_ratio_clamp=clamp,
        rejection=rejection,
        token_veto=veto,
    ),
    level=st.sampled_from(("token", "sequence", "geometric")),
    mode=st.sampled_from(("truncate", "clip", "mask", "off")),
    low=bounds,
    high=st.sampled_from((1.1, 2.0, 1e6)),
    normalize=st.booleans(),
    clamp=st.sampled_from((1.0, 20.0, 88.0)),
    rejection=st.none()
    | st.builds(
        Rejection,
        level=st.sampled_from(("token", "sequence", "geometric")),
        low=bounds,
        high=st.sampled_from((1.001, 2.0, 1e4)),
    ),
    veto=st.none() | st.sampled_from((1e-4, 0.3)),
)
losses = st.builds(
    lambda loss_mode, dual_clip, loss_aggregation, **named: GRPOConfig(
        loss_mode=loss_mode,
        dual_clip=None if loss_mode == "cispo" else dual_clip,
        loss_aggregation="sequence" if "gspo" in loss_mode else loss_aggregation,
        **named,
    ),
    loss_mode=st.sampled_from(("ppo", "gspo", "gspo_token", "cispo")),
    clip_low=st.sampled_from((0.1, 0.2, 1.0)),
    clip_high=st.sampled_from((0.2, 5.0)),
    dual_clip=st.none() | st.sampled_from((1.5, 3.0)),
    kl_coefficient=st.sampled_from((0.0, 0.1)),
    loss_aggregation=st.sampled_from(("token", "sequence")),
)


def difference(numerator: Array, denominator: Array, mask: Array) -> Array:
    """Log ratio in float64, 0 outside of the mask; NaN where two infinities meet."""
    with np.errstate(invalid="ignore"):
        found = numerator.astype(np.float64) - denominator.astype(np.float64)
    return np.clip(np.where(mask, found, 0.0), -SATURATION, SATURATION)


def of_level(log_ratio: Array, mask: Array, level: str) -> Array:
    if level == "token":
        return log_ratio
    total = log_ratio.sum(axis=1, keepdims=True)
    if level == "geometric":
        total = total / np.maximum(mask.sum(axis=1, keepdims=True), 1)
    return np.broadcast_to(total, log_ratio.shape)


def weights_of(b: Batch, c: ImportanceSampling) -> tuple[Array, Array]:
    """Weights and kept mask, float64, from the docstrings of ``correct`` and ``reject``."""
    raw = difference(b.logprobs["old"], b.logprobs["rollout"], b.mask)
    limit = c.log_ratio_clamp
    value = of_level(np.clip(raw, -limit, limit), b.mask, c.level)
    ratio = np.exp(np.clip(value, -limit, limit))
    kept = b.mask.copy()
    if c.rejection is not None:
        unit = of_level(raw, b.mask, c.rejection.level)
        for bound, side in ((c.rejection.low, -1), (c.rejection.high, 1)):
            assert bound is not None
            no_tie(unit[b.mask], math.log(bound))
            kept &= side * unit <= side * math.log(bound)
    if c.token_veto is not None:
        no_tie(raw[b.mask], math.log(c.token_veto))
        kept &= ~(b.mask & (raw < math.log(c.token_veto))).any(axis=1, keepdims=True)
    for bound in (c.low, c.high):
        if bound is not None:
            no_tie(value[b.mask], math.log(bound))
    weight = {
        "truncate": lambda: np.minimum(ratio, c.high),
        "clip": lambda: np.clip(ratio, c.low, c.high),
        "mask": lambda: np.where((ratio >= (c.low or 0)) & (ratio <= c.high), ratio, 0.0),
        "off": lambda: np.ones_like(ratio),
    }[c.mode]()
    weight = np.where(kept, weight, 0.0)
    if c.self_normalize:
        if c.level == "token":
            units = weight[kept]
        else:
            units = np.array([row[k][0] for row, k in zip(weight, kept, strict=True) if k.any()])
        mean = units.mean() if units.size else 0.0
        weight = weight / mean if mean > 0 else weight
    return weight, kept


def no_tie(values: Array, bound: float) -> None:
    """Leave out what float32 cannot tell apart from a bound."""
    assume(not (np.abs(values - bound) < 1e-4 * (1 + abs(bound))).any())


def loss_of(
    b: Batch, c: ImportanceSampling, g: GRPOConfig, weights: Array, kept: Array
) -> tuple[float, float, float]:
    """The loss of the docstring of ``GRPOLoss``, the sum of its terms' magnitudes, and the largest
    number on the way there.
    """
    limit = c.log_ratio_clamp
    moved = difference(b.logprobs["current"], b.logprobs["old"], kept)
    if "gspo" in g.loss_mode:
        moved = of_level(np.clip(moved, -limit, limit), kept, "geometric")
    for bound in (1 - g.clip_low, 1 + g.clip_high, g.dual_clip):
        if bound:
            no_tie(moved[kept], math.log(bound))
    ratio = np.exp(np.clip(moved, -limit, limit))
    advantage = np.broadcast_to(b.advantages.astype(np.float64)[:, None], ratio.shape)
    clipped = np.clip(ratio, 1 - g.clip_low, 1 + g.clip_high)
    terms = np.maximum(-advantage * ratio, -advantage * clipped)
    if g.dual_clip is not None:
        bounded = np.minimum(terms, -advantage * g.dual_clip)
        terms = np.where(advantage < 0, bounded, terms)
    if g.loss_mode == "cispo":
        current = np.maximum(np.where(kept, b.logprobs["current"], 0.0), -SATURATION)
        terms = -advantage * clipped * current
    largest = np.abs(np.where(kept, -advantage * ratio, 0.0)).max()
    terms = weights * terms
    x = np.clip(difference(b.logprobs["reference"], b.logprobs["current"], kept), -limit, limit)
    k3 = np.where(kept, np.expm1(x) - x, 0.0)
    terms = np.where(kept, terms + g.kl_coefficient * k3, 0.0)
    if g.loss_aggregation == "token":
        share = np.where(kept, 1 / max(kept.sum(), 1), 0.0)
    else:
        lengths, rows = kept.sum(axis=1, keepdims=True), kept.any(axis=1).sum()
        share = np.where(kept, 1 / np.maximum(lengths * rows, 1), 0.0)
    largest = max(largest, np.abs(terms).sum(), k3.sum())
    size = np.abs(terms) + g.kl_coefficient * 2.0**-12 * np.abs(x)  # k3 loses digits near 0
    return float((terms * share).sum()), float((size * share).sum()), float(largest)


def tensors(b: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(values.copy()) for name, values in b.logprobs.items()}


def test_weights_and_rejection(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    @settings(parent=budget(150))
    @given(b=batches(), c=correctors)
    def check(b: Batch, c: ImportanceSampling) -> None:
        t, mask = tensors(b), torch.from_numpy(b.mask)
        raw = difference(b.logprobs["old"], b.logprobs["rollout"], b.mask)
        counts["batches of logprobs"] += 1
        if not b.mask.any() or np.isnan(raw).any():
            with pytest.raises(BatchError, match=r"NaN at row|no token"):
                correct(t["rollout"], t["old"], mask, c)
            return
        weights, kept = weights_of(b, c)
        got = correct(t["rollout"], t["old"], mask, c)
        assert (got.mask.numpy() == kept).all()
        np.testing.assert_allclose(got.weights.numpy(), weights, rtol=2e-4, atol=1e-30)
        shares = {n: v for n, v in got.metrics.items() if n.endswith("_share")}
        assert all(0 <= share <= 1 for share in shares.values()), shares

    check()


def test_losses(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    @settings(parent=budget(150))
    @given(b=batches(), c=correctors, g=losses)
    def check(b: Batch, c: ImportanceSampling, g: GRPOConfig) -> None:
        loss, gradient = outcome(b, c, g)
        counts["losses"] += 1
        raw = difference(b.logprobs["old"], b.logprobs["rollout"], b.mask)
        if not b.mask.any() or np.isnan(raw).any():
            assert isinstance(loss, BatchError)
            return
        weights, kept = weights_of(b, c)
        used = [("current", "old"), ("reference", "current")]
        if any(np.isnan(difference(b.logprobs[n], b.logprobs[d], kept)).any() for n, d in used):
            assert isinstance(loss, BatchError)
            return
        expected, size, largest = loss_of(b, c, g, weights, kept)
        if isinstance(loss, BatchError):
            assert largest > LARGEST, loss
            return
        assert abs(loss - expected) <= 5e-4 * size + 1e-30, (loss, expected)
        assert np.isfinite(gradient).all()
        assert (gradient[~kept] == 0).all()

    check()


def outcome(b: Batch, c: ImportanceSampling, g: GRPOConfig) -> Any:
    """Loss and gradient, or the error."""
    t, mask = tensors(b), torch.from_numpy(b.mask)
    current = t["current"].requires_grad_()
    try:
        loss, _ = GRPOLoss(g, c, PLUGINS)(
            current, t["old"], t["rollout"], torch.from_numpy(b.advantages), mask, t["reference"]
        )
    except BatchError as error:
        return error, None
    loss.backward()
    assert current.grad is not None
    return loss.item(), current.grad.numpy()

"""Importance weights, rejection and loss of any logprobs, against float64 (``support.grpo``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import PluginManager
from fp8rl.errors import BatchError
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.importance_sampling import correct
from nemo_rl_ext.grpo.loss import GRPOConfig, GRPOLoss
from support.grpo import Batch, corrected, correctors, difference, loss_of, losses

LARGEST = torch.finfo(torch.float32).max
PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)

ordinary = st.floats(-12.0, 0.0, width=32)
extreme = st.sampled_from((-math.inf, -1e30, -3e38, -1e-30, -0.0, 0.0, -88.0, -89.0, -1e4, 88.5))
never_read = st.sampled_from((math.nan, math.inf, -math.inf, 1e30, 7.0))


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    mask = [[draw(st.booleans()) for _ in range(columns)] for _ in range(rows)]
    logprobs = {}
    for name in ("rollout", "old", "current", "reference"):
        counted = draw(st.sampled_from((ordinary, st.one_of(ordinary, extreme))))
        logprobs[name] = torch.tensor(
            [[draw(counted if m else never_read) for m in row] for row in mask]
        )
    advantage = st.one_of(st.floats(-3, 3, width=32), st.sampled_from((0.0, -1e3, 1e3)))
    advantages = torch.tensor([draw(advantage) for _ in range(rows)])
    return Batch(mask=torch.tensor(mask), advantages=advantages, **logprobs)


def is_refused(b: Batch) -> bool:
    return not b.mask.any() or bool(difference(b.old, b.rollout, b.mask).isnan().any())


def test_weights_and_rejection(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    @settings(parent=budget(150))
    @given(b=batches(), c=correctors())
    def check(b: Batch, c: ImportanceSampling) -> None:
        counts["batches of logprobs"] += 1
        if is_refused(b):
            with pytest.raises(BatchError, match=r"NaN at row|no token"):
                correct(b.rollout, b.old, b.mask, c)
            return
        weights, kept, _ = corrected(b, c)
        got = correct(b.rollout, b.old, b.mask, c)
        assert torch.equal(got.mask, kept)
        torch.testing.assert_close(got.weights.double(), weights, rtol=2e-4, atol=1e-30)
        shares = {n: v for n, v in got.metrics.items() if n.endswith("_share")}
        assert all(0 <= share <= 1 for share in shares.values()), shares

    check()


def test_losses(budget: Callable[[int], settings], counts: Counter[str]) -> None:
    @settings(parent=budget(150))
    @given(b=batches(), c=correctors(), g=losses())
    def check(b: Batch, c: ImportanceSampling, g: GRPOConfig) -> None:
        counts["losses"] += 1
        b.current.requires_grad_()
        try:
            loss, _ = GRPOLoss(g, c, PLUGINS)(*b.args())
        except BatchError as error:
            loss = error
        else:
            loss.backward()
        if is_refused(b):
            assert isinstance(loss, BatchError)
            return
        weights, kept, _ = corrected(b, c)
        used = [(b.current, b.old), (b.reference, b.current)]
        if any(difference(n.detach(), d.detach(), kept).isnan().any() for n, d in used):
            assert isinstance(loss, BatchError)
            return
        expected = loss_of(b, c.log_ratio_clamp, g, weights, kept)
        if isinstance(loss, BatchError):
            assert expected.largest > LARGEST, loss
            return
        off = abs(loss.item() - expected.loss.item())
        assert off <= 5e-4 * expected.size + 1e-30, (loss, expected)
        assert b.current.grad.isfinite().all()
        assert not b.current.grad[~kept].any()

    check()

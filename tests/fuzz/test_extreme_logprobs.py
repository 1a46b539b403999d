"""Importance weights, rejection and loss of any logprobs, against float64 (``support.grpo``)."""

from __future__ import annotations

import math

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


def test_weights_rejection_and_loss(budget, counts):
    @settings(parent=budget(150))
    @given(b=batches(), c=correctors(), g=losses())
    def check(b: Batch, c: ImportanceSampling, g: GRPOConfig) -> None:
        counts["batches of logprobs"] += 1
        loss_fn = GRPOLoss(g, c, PLUGINS)
        if not b.mask.any() or difference(b.old, b.rollout, b.mask).isnan().any():
            for refused in (
                lambda: correct(b.rollout, b.old, b.mask, c),
                lambda: loss_fn(*b.args()),
            ):
                with pytest.raises(BatchError, match=r"NaN at row|no token"):
                    refused()
            return
        weights, kept, _ = corrected(b, c)
        got = correct(b.rollout, b.old, b.mask, c)
        assert torch.equal(got.mask, kept)
        torch.testing.assert_close(got.weights.double(), weights, rtol=2e-4, atol=1e-30)
        shares = {n: v for n, v in got.metrics.items() if n.endswith("_share")}
        assert all(0 <= share <= 1 for share in shares.values()), shares

        expected = loss_of(b, c.log_ratio_clamp, g, weights, kept)
        used = ((b.current, b.old), (b.reference, b.current))
        undefined = any(difference(n, d, kept).isnan().any() for n, d in used)
        b.current.requires_grad_()
        try:
            loss, _ = loss_fn(*b.args())
        except BatchError:
            assert undefined or expected.largest > LARGEST
            return
        assert not undefined
        loss.backward()
        off = abs(loss.item() - expected.loss.item())
        assert off <= 5e-4 * expected.size + 1e-30, (loss, expected)
        assert b.current.grad.isfinite().all()
        assert not b.current.grad[~kept].any()

    check()

"""Weights, rejection, losses and gradients of any recipe against float64 (``support.grpo``)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl import PluginManager
from fp8rl.mismatch import mismatch_metrics
from nemo_rl_ext import hooks
from nemo_rl_ext.grpo.importance_sampling import correct
from nemo_rl_ext.grpo.loss import GRPOLoss
from support.grpo import LOSSES, WEIGHTING, batches, corrected, correctors, loss_of, losses

PLUGINS = PluginManager(discover=False)
PLUGINS.register(hooks)


@pytest.mark.parametrize("mode", WEIGHTING)
@settings(max_examples=50)
@given(data=st.data(), b=batches(0.01, 0.3, 2.0, 30.0))
def test_weights_mask_and_metrics(mode: str, data: st.DataObject, b) -> None:
    assume(bool(b.mask.any()))
    c = data.draw(correctors(mode))
    weights, kept, metrics = corrected(b, c)
    found = correct(b.rollout, b.old, b.mask, c)
    assert found.weights.dtype == torch.float32
    assert torch.equal(found.mask, kept)
    torch.testing.assert_close(found.weights.double(), weights, rtol=1e-4, atol=1e-12)
    for name, value in metrics.items():
        close = 1e-5 if name.startswith("is_weight") else 1e-12
        assert found.metrics[name] == pytest.approx(value, rel=close, abs=1e-12), name
    mismatch = mismatch_metrics(b.rollout, b.old, b.mask).to_dict()
    assert mismatch.items() <= found.metrics.items()


@pytest.mark.parametrize("mode", LOSSES)
@settings(max_examples=50)
@given(data=st.data(), b=batches(0.3))
def test_loss_gradient_and_metrics(mode: str, data: st.DataObject, b) -> None:
    assume(bool(b.mask.any()))
    c, g = data.draw(correctors()), data.draw(losses(mode))
    loss_fn = GRPOLoss(g, c, PLUGINS)
    correction = loss_fn.correct(b.rollout, b.old, b.mask)
    expected = loss_of(b, c.log_ratio_clamp, g, correction.weights, correction.mask)
    loss, metrics = loss_fn(*b.args())
    (gradient,) = torch.autograd.grad(loss, b.current)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), expected.gradient, rtol=1e-5, atol=1e-6)
    for name, value in expected.metrics.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert correction.metrics.items() <= metrics.items()
    assert all(type(value) in (int, float) for value in metrics.values())

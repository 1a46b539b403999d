"""Weights at their edges, and what a plugin's corrector may return; formulas: test_formulas.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8rl.errors import PluginError
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext.grpo.importance_sampling import Correction, correct


@pytest.mark.parametrize("gap", [30.0, math.inf])
@pytest.mark.parametrize("clamp", [20.0, 88.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_overflow_takes_the_bound_and_underflow_stays_small(
    level: str, clamp: float, gap: float
) -> None:
    rollout = torch.tensor([[-gap, -gap], [-0.5, -0.5]])
    for mode, up, down in (("truncate", 1.7, 0.0), ("clip", 1.7, 0.6), ("mask", 0.0, 0.0)):
        low = None if mode == "truncate" else 0.6
        settings = ImportanceSampling(
            level=level, mode=mode, low=low, high=1.7, log_ratio_clamp=clamp
        )
        got = correct(rollout, rollout.flip(0), torch.ones(2, 2), settings)
        assert got.weights[0].tolist() == pytest.approx([up, up])
        assert got.weights[1].tolist() == pytest.approx([down, down], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("clamp", "weight"), [(88.0, 1e38), (20.0, math.exp(20))])
def test_with_no_reachable_bound_the_weight_is_capped_and_finite(
    clamp: float, weight: float
) -> None:
    c = ImportanceSampling(level="sequence", high=1e38, log_ratio_clamp=clamp)
    got = correct(torch.full((1, 4), -50.0), torch.zeros(1, 4), torch.ones(1, 4), c)
    assert got.weights[0].tolist() == pytest.approx([weight] * 4, rel=1e-5)


def test_bfloat16_is_upcast_before_the_subtraction() -> None:
    rollout = torch.tensor([[-2.0, -1.0]], dtype=torch.bfloat16)
    trainer = torch.tensor([[-2.015625, -0.003]], dtype=torch.bfloat16)
    settings = ImportanceSampling(high=10.0)
    got = correct(rollout, trainer, torch.ones(1, 2), settings)
    wide = correct(rollout.float(), trainer.float(), torch.ones(1, 2), settings)
    assert got.weights.dtype == torch.float32 and torch.equal(got.weights, wide.weights)


def test_a_token_impossible_for_the_trainer_is_vetoed() -> None:
    trainer = torch.tensor([[-0.1, -math.inf], [-0.1, -0.1]])
    got = correct(
        torch.full((2, 2), -0.1), trainer, torch.ones(2, 2), ImportanceSampling(token_veto=1e-4)
    )
    assert got.mask.tolist() == [[False, False], [True, True]]
    assert got.weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]


HALF = torch.tensor([[True, False, True], [True, True, False]])
PART = HALF.float()


@pytest.mark.parametrize(
    ("weights", "mask", "metrics", "message"),
    [
        (-PART, HALF, {}, r"weight of -1 at row 0, token 0, which is neither 0 nor a pos"),
        (PART / (1 - PART), HALF, {}, r"weight of inf at row 0, token 0, .*\(4 such in all\)"),
        (PART * torch.nan, HALF & False, {}, "weight of nan"),
        (torch.ones(2, 3), HALF, {}, "at row 0, token 1, which is not 0 although its mask leaves"),
        (torch.ones(2, 3), HALF | True, {}, "of a token that the batch's mask does not count"),
        (PART.double(), HALF, {}, r"in float32 and a mask in bool, not torch.float64"),
        (PART, PART, {}, r"and torch.float32; convert them"),
        (PART.tolist(), HALF, {}, "weights and mask as tensors, not list and Tensor"),
        (PART[:1], HALF[:1], {}, r"weights \(1, 3\) and mask \(1, 3\) for a batch of"),
        (PART.to("meta"), HALF, {}, "on another device than the batch's cpu"),
        (PART, HALF, None, "a dict of Python numbers by name, not None"),
        (PART, HALF, {"mine": "much"}, "a dict of Python numbers by name"),
    ],
)
def test_what_a_plugins_corrector_returns_is_checked(
    weights: Any, mask: Any, metrics: Any, message: str
) -> None:
    """Naively a negative weight turns the gradient around."""
    rollout, settings = torch.full((2, 3), -1.0), ImportanceSampling(corrector="mine")
    with pytest.raises(PluginError, match=rf"corrector 'mine' .*{message}"):
        correct(rollout, rollout, HALF, settings, lambda *given: Correction(weights, mask, metrics))


def test_weights_of_a_plugins_corrector_carry_no_gradient() -> None:
    old = torch.full((2, 3), -1.0, requires_grad=True)
    mine = ImportanceSampling(corrector="mine")
    made = Correction(old.exp() * HALF, HALF, {})
    assert not correct(old.detach(), old, HALF, mine, lambda *_: made).weights.requires_grad

"""Weights against a float64 formula written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fp8rl.errors import PluginError
from fp8rl.mismatch import mismatch_metrics
from fp8rl.recipe import ImportanceSampling
from nemo_rl_ext.grpo.importance_sampling import Correction, correct

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask", "off")


def config(level: str, mode: str, **more: object) -> ImportanceSampling:
    low = {"low": 0.6} if mode in ("clip", "mask") else {}
    return ImportanceSampling(**{"level": level, "mode": mode, "high": 1.7, **low, **more})


def batch(
    seed: int, rows: int, columns: int, spread: float, density: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    trainer = -3 * torch.rand(rows, columns, generator=generator)
    rollout = trainer + spread * torch.randn(rows, columns, generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < density
    return rollout, trainer, mask


batches = st.builds(
    batch,
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    columns=st.integers(1, 6),
    spread=st.sampled_from([0.01, 0.3, 2.0, 30.0]),
    density=st.sampled_from([0.3, 0.8, 1.1]),
)


def written_out_ratios(
    rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, level: str, clamp: float
) -> list[list[float]]:
    """Ratio of every counted token, 0 elsewhere; Python floats are float64."""
    result = []
    for r_row, t_row, m_row in zip(rollout.tolist(), trainer.tolist(), mask.tolist(), strict=True):
        deltas = [
            max(-clamp, min(clamp, t - r)) if m else None
            for r, t, m in zip(r_row, t_row, m_row, strict=True)
        ]
        kept = [d for d in deltas if d is not None]
        total = max(-clamp, min(clamp, math.fsum(kept)))
        row = []
        for d in deltas:
            if d is None:
                row.append(0.0)
            elif level == "token":
                row.append(math.exp(d))
            elif level == "sequence":
                row.append(math.exp(total))
            else:
                row.append(math.exp(math.fsum(kept) / len(kept)))
        result.append(row)
    return result


def written_out_weight(ratio: float, c: ImportanceSampling) -> float:
    if c.mode == "truncate":
        return min(ratio, c.high)
    if c.mode == "clip":
        return min(max(ratio, c.low), c.high)
    if c.mode == "mask":
        return ratio if c.low <= ratio <= c.high else 0.0
    return 1.0


def near_a_bound(ratios: list[list[float]], c: ImportanceSampling) -> bool:
    bounds = [b for b in (c.low, c.high) if b is not None]
    return any(abs(x / b - 1) < 1e-4 for row in ratios for x in row for b in bounds)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(data=batches)
def test_weights_equal_the_formula(
    level: str, mode: str, data: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    rollout, trainer, mask = data
    assume(bool(mask.any()))
    c = config(level, mode)
    ratios = written_out_ratios(rollout, trainer, mask, level, c.log_ratio_clamp)
    assume(not near_a_bound(ratios, c))

    got = correct(rollout, trainer, mask, c)

    assert got.weights.dtype == torch.float32
    assert torch.equal(got.mask, mask)
    for i, row in enumerate(mask.tolist()):
        for j, counts in enumerate(row):
            expected = written_out_weight(ratios[i][j], c) if counts else 0.0
            assert got.weights[i, j].item() == pytest.approx(expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=25, deadline=None)
@given(data=batches)
def test_self_normalised_weights_have_mean_one_over_kept_units(
    level: str, data: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    rollout, trainer, mask = data
    assume(bool(mask.any()))
    c = config(level, "truncate", self_normalize=True)
    ratios = written_out_ratios(rollout, trainer, mask, level, c.log_ratio_clamp)
    plain = [[written_out_weight(x, c) for x in row] for row in ratios]
    if level == "token":
        units = [plain[i][j] for i, j in mask.nonzero().tolist()]
    else:  # each sequence once, however long it is
        units = [plain[i][mask[i].tolist().index(True)] for i in range(len(mask)) if mask[i].any()]
    mean = math.fsum(units) / len(units)

    got = correct(rollout, trainer, mask, c)

    assert got.metrics["is_weight_mean"] == pytest.approx(1.0, rel=1e-5)
    for i, j in mask.nonzero().tolist():
        assert got.weights[i, j].item() == pytest.approx(plain[i][j] / mean, rel=1e-4)


@pytest.mark.parametrize("gap", [30.0, 300.0, math.inf])
@pytest.mark.parametrize("clamp", [20.0, 88.0])
@pytest.mark.parametrize("level", LEVELS)
def test_overflow_takes_the_bound_and_underflow_stays_small(
    level: str, clamp: float, gap: float
) -> None:
    rollout = torch.tensor([[-gap, -gap], [-0.5, -0.5]])
    trainer = torch.tensor([[-0.5, -0.5], [-gap, -gap]])
    mask = torch.ones(2, 2)
    for mode, up, down in (("truncate", 1.7, 0.0), ("clip", 1.7, 0.6), ("mask", 0.0, 0.0)):
        got = correct(rollout, trainer, mask, config(level, mode, log_ratio_clamp=clamp))
        assert got.weights[0].tolist() == pytest.approx([up, up])
        assert got.weights[1].tolist() == pytest.approx([down, down], rel=1e-6, abs=1e-8)


def test_with_no_reachable_bound_the_weight_is_capped_and_finite() -> None:
    c = ImportanceSampling(level="sequence", high=1e38, log_ratio_clamp=88.0)
    got = correct(torch.full((1, 4), -50.0), torch.zeros(1, 4), torch.ones(1, 4), c)
    assert torch.isfinite(got.weights).all()
    assert got.weights.min() == pytest.approx(1e38, rel=1e-6)
    plain = ImportanceSampling(level="sequence", high=1e38)
    got = correct(torch.full((1, 4), -50.0), torch.zeros(1, 4), torch.ones(1, 4), plain)
    assert got.weights[0].tolist() == pytest.approx([math.exp(20)] * 4, rel=1e-5)


def test_bfloat16_is_upcast_before_the_subtraction() -> None:
    rollout = torch.tensor([[-2.0, -1.0]], dtype=torch.bfloat16)
    trainer = torch.tensor([[-2.015625, -0.003]], dtype=torch.bfloat16)
    for level in LEVELS:
        c = ImportanceSampling(level=level, high=10.0)
        expected = written_out_ratios(rollout, trainer, torch.ones(1, 2).bool(), level, 20.0)
        got = correct(rollout, trainer, torch.ones(1, 2), c)
        assert got.weights.dtype == torch.float32
        assert got.weights[0].tolist() == pytest.approx(expected[0], rel=1e-6)
    in_bf16 = (trainer - rollout).float().exp()[0, 1].item()
    token = correct(rollout, trainer, torch.ones(1, 2), ImportanceSampling(high=10.0))
    assert abs(token.weights[0, 1].item() - in_bf16) > 1e-4


def test_self_normalisation_of_weights_that_are_all_zero_keeps_them_zero() -> None:
    c = config("token", "mask", self_normalize=True)
    got = correct(torch.full((1, 2), -5.0), torch.zeros(1, 2), torch.ones(1, 2), c)
    assert got.weights.tolist() == [[0.0, 0.0]]
    assert got.mask.all()
    assert got.metrics["is_weight_ess"] == 0.0


@pytest.mark.parametrize("level", LEVELS)
def test_metrics_equal_their_formulas(level: str) -> None:
    rollout, trainer, mask = batch(3, 4, 6, 1.5, 0.7)
    c = config(level, "clip")
    ratios = written_out_ratios(rollout, trainer, mask, level, 20.0)
    if level == "token":
        rho = [ratios[i][j] for i, j in mask.nonzero().tolist()]
    else:
        rho = [max(row) for row, m in zip(ratios, mask.tolist(), strict=True) if any(m)]
    w = [written_out_weight(x, c) for x in rho]

    metrics = correct(rollout, trainer, mask, c).metrics

    assert metrics["is_weight_mean"] == pytest.approx(sum(w) / len(w), rel=1e-5)
    assert metrics["is_weight_min"] == pytest.approx(min(w), rel=1e-5)
    assert metrics["is_weight_max"] == pytest.approx(max(w), rel=1e-5)
    ess = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
    assert metrics["is_weight_ess"] == pytest.approx(ess, rel=1e-5)
    assert metrics["is_low_share"] == pytest.approx(sum(x < c.low for x in rho) / len(rho))
    assert metrics["is_high_share"] == pytest.approx(sum(x > c.high for x in rho) / len(rho))
    assert sum(x < c.low or x > c.high for x in rho) > 0
    mismatch = mismatch_metrics(rollout, trainer, mask).to_dict()
    assert mismatch.items() <= metrics.items()


HALF = torch.tensor([[True, False, True], [True, True, False]])


@pytest.mark.parametrize(
    ("weights", "mask", "metrics", "message"),
    [
        (-HALF.float(), HALF, {}, r"weight of -1 at row 0, token 0, which is neither 0 nor a pos"),
        (HALF * torch.nan, HALF, {}, "weight of nan at row 0, token 0"),
        (
            HALF.float().masked_fill(HALF, torch.inf),
            HALF,
            {},
            r"weight of inf at row 0, token 0, .*\(4 such in all\)",
        ),
        (torch.ones(2, 3), HALF, {}, "at row 0, token 1, which is not 0 although its mask leaves"),
        (torch.full((2, 3), torch.nan), HALF & False, {}, "weight of nan"),
        (torch.ones(2, 3), HALF | True, {}, "of a token that the batch's mask does not count"),
        (HALF.double(), HALF, {}, r"in float32 and a mask in bool, not torch.float64"),
        (HALF.int(), HALF, {}, r"in float32 and a mask in bool, not torch.int32"),
        (HALF.float(), HALF.float(), {}, r"and torch.float32; convert them"),
        (HALF.float().tolist(), HALF, {}, "weights and mask as tensors, not list and Tensor"),
        (HALF.float()[:1], HALF[:1], {}, r"weights \(1, 3\) and mask \(1, 3\) for a batch of"),
        (HALF.float().to("meta"), HALF, {}, "on another device than the batch's cpu"),
        (HALF.float(), HALF, None, "a dict of Python numbers by name, not None"),
        (HALF.float(), HALF, {"mine": "much"}, "a dict of Python numbers by name"),
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
    got = correct(
        old.detach() - 0.1,
        old,
        HALF,
        ImportanceSampling(corrector="mine"),
        lambda rollout, trainer, mask, _: Correction((trainer - rollout).exp() * mask, mask, {}),
    )
    assert not got.weights.requires_grad

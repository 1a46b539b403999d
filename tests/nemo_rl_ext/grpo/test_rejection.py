"""Rejection against loops over rows and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.recipe import ImportanceSampling, Rejection
from nemo_rl_ext.grpo.importance_sampling import correct
from nemo_rl_ext.grpo.rejection import reject


def written_out(
    log_ratio: list[list[float]],
    mask: list[list[bool]],
    level: str,
    low: float | None,
    high: float | None,
    veto: float | None,
) -> tuple[list[list[bool]], dict[str, float]]:
    kept, reasons = [], {"low": 0, "high": 0, "veto": 0}
    tokens = rows = rows_left = 0
    for d_row, m_row in zip(log_ratio, mask, strict=True):
        deltas = [d for d, m in zip(d_row, m_row, strict=True) if m]
        vetoed = veto is not None and any(math.exp(d) < veto for d in deltas)
        row = []
        for d, m in zip(d_row, m_row, strict=True):
            if not m:
                row.append(False)
                continue
            unit = {
                "token": d,
                "sequence": sum(deltas),
                "geometric": sum(deltas) / len(deltas),
            }[level]
            below = low is not None and math.exp(unit) < low
            above = high is not None and math.exp(unit) > high
            reasons["low"] += below
            reasons["high"] += above
            reasons["veto"] += vetoed
            row.append(not (below or above or vetoed))
        tokens += len(deltas)
        rows += bool(deltas)
        rows_left += any(row)
        kept.append(row)
    left = sum(map(sum, kept))
    metrics = {f"rejected_{name}_share": n / max(tokens, 1) for name, n in reasons.items()}
    metrics["rejected_share"] = (tokens - left) / max(tokens, 1)
    metrics["rejected_sequence_share"] = (rows - rows_left) / max(rows, 1)
    metrics["all_rejected"] = float(tokens > 0 and left == 0)
    return kept, metrics


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    columns=st.integers(1, 6),
    density=st.sampled_from([0.2, 0.8, 1.1]),
    bounds=st.sampled_from([(0.7, None), (None, 1.4), (0.7, 1.4), None]),
    veto=st.sampled_from([None, 0.45]),
)
def test_equals_the_loops(
    level: str,
    seed: int,
    rows: int,
    columns: int,
    density: float,
    bounds: tuple[float | None, float | None] | None,
    veto: float | None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < density
    log_ratio = 0.4 * torch.randn(rows, columns, generator=generator) * mask
    low, high = bounds or (None, None)
    rejection = Rejection(level=level, low=low, high=high) if bounds else None

    got = reject(log_ratio, mask, rejection, veto)

    kept, metrics = written_out(log_ratio.tolist(), mask.tolist(), level, low, high, veto)
    assert got.mask.tolist() == kept
    assert got.metrics == pytest.approx(metrics)


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask", "off"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_rejection_is_independent_of_the_weighting(mode: str, level: str) -> None:
    generator = torch.Generator().manual_seed(4)
    rollout = -torch.rand(6, 5, generator=generator)
    trainer = rollout + 0.3 * torch.randn(6, 5, generator=generator)
    rejection = Rejection(level="geometric", low=0.9, high=1.1)
    low = 0.8 if mode in ("clip", "mask") else None
    common = {"mode": mode, "level": level, "low": low, "high": 1.2}
    plain = correct(rollout, trainer, torch.ones(6, 5), ImportanceSampling(**common))
    got = correct(
        rollout, trainer, torch.ones(6, 5), ImportanceSampling(**common, rejection=rejection)
    )
    expected = [0.9 <= math.exp(d) <= 1.1 for d in (trainer - rollout).double().mean(1).tolist()]
    assert 0 < sum(expected) < 6
    assert got.mask.all(dim=1).tolist() == got.mask.any(dim=1).tolist() == expected
    # What stays keeps the weight that it has without rejection.
    assert torch.equal(got.weights, plain.weights * got.mask)


def test_bounds_beyond_the_clamp_still_reject() -> None:
    rollout = torch.tensor([[0.0, 0.0], [-40.0, 0.0]])
    trainer = torch.tensor([[-40.0, 0.0], [0.0, 0.0]])
    c = ImportanceSampling(
        log_ratio_clamp=5.0, rejection=Rejection(level="sequence", high=1e12), token_veto=1e-9
    )
    got = correct(rollout, trainer, torch.ones(2, 2), c)
    assert not got.mask.any()
    assert got.metrics["rejected_veto_share"] == got.metrics["rejected_high_share"] == 0.5
    assert got.metrics["all_rejected"] == 1.0


def test_a_token_impossible_for_the_trainer_is_vetoed() -> None:
    trainer = torch.tensor([[-0.1, -math.inf], [-0.1, -0.1]])
    got = correct(
        torch.full((2, 2), -0.1), trainer, torch.ones(2, 2), ImportanceSampling(token_veto=1e-4)
    )
    assert got.mask.tolist() == [[False, False], [True, True]]
    assert got.weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]

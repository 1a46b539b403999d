"""Advantages against the papers' formulas, written out with Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_ext.grpo.advantages import group_relative_advantages

answers = st.lists(
    st.tuples(
        st.sampled_from([-1.0, 0.0, 0.1, 0.25, 1.0, 3.7]),
        st.sampled_from([-5, 0, 1, 2, 10**12]),
    ),
    min_size=1,
    max_size=12,
)


def written_out(
    rewards: list[float], ids: list[int], normalize_std: bool, leave_one_out: bool, eps: float
) -> list[float]:
    result = []
    for i, reward in enumerate(rewards):
        group = [r for r, g in zip(rewards, ids, strict=True) if g == ids[i]]
        if all(r == group[0] for r in group):
            result.append(0.0)
            continue
        mean, size = sum(group) / len(group), len(group)
        advantage = reward - ((sum(group) - reward) / (size - 1) if leave_one_out else mean)
        if normalize_std:
            advantage /= math.sqrt(sum((r - mean) ** 2 for r in group) / (size - 1)) + eps
        result.append(advantage)
    return result


@settings(max_examples=60)
@given(batch=answers, normalize_std=st.booleans(), leave_one_out=st.booleans())
def test_equals_the_formula_for_groups_of_any_size_and_order(
    batch: list[tuple[float, int]], normalize_std: bool, leave_one_out: bool
) -> None:
    rewards, ids = [r for r, _ in batch], [g for _, g in batch]
    got = group_relative_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(ids),
        normalize_std=normalize_std,
        leave_one_out=leave_one_out,
        eps=1e-4,
    )
    expected = written_out(rewards, ids, normalize_std, leave_one_out, 1e-4)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_a_group_without_spread_or_of_one_answer_has_exactly_no_advantage() -> None:
    # 0.1 three times has a mean that is not 0.1 in float64.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64)
    for options in ({}, {"normalize_std": False}, {"leave_one_out": True}):
        got = group_relative_advantages(rewards, torch.tensor([7, 7, 7, 1]), eps=0.0, **options)
        assert got.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_integer_rewards_an_empty_batch_and_rewards_with_a_gradient() -> None:
    ids = torch.tensor([0, 0], dtype=torch.int32)
    got = group_relative_advantages(torch.tensor([0, 1]), ids, normalize_std=False)
    assert got.tolist() == [-0.5, 0.5]
    assert group_relative_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert not group_relative_advantages(rewards, ids).requires_grad

"""Magnitudes gathered over calls, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import AMAX_BINS, amax_edges, amax_into, count_amax


def test_slots_rise_and_never_fall():
    slots = torch.tensor([0.0, 5.0, 1.0])
    x = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    amax_into(slots, [x, x.half()[:, 1], x.float()[:0]])
    assert slots.tolist() == [x.abs().max().item(), 5.0, 1.0]
    amax_into(slots, [x * 0.5, -8.0 * torch.ones(1), torch.tensor(-3.0)])
    assert slots.tolist() == [x.abs().max().item(), 8.0, 3.0]


def test_infinity_is_larger_and_nan_stays():
    slots = torch.zeros(2)
    amax_into(slots, [torch.tensor([1.0, -torch.inf]), torch.tensor([torch.nan, 2.0])])
    amax_into(slots, [torch.ones(3), torch.full((3,), torch.inf)])
    assert slots[0] == torch.inf and slots[1].isnan()


@given(st.lists(st.floats(2.0**-32, 2.0**31, width=32), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_a_bin_ends_at_most_a_32nd_above_its_members(values):
    counts = torch.zeros(1, AMAX_BINS + 1, dtype=torch.int64)
    rows = torch.tensor(values)[:, None] * torch.tensor([0.25, -1.0, 0.5])
    count_amax(counts, [rows])
    assert counts.sum() == len(values)
    edges = amax_edges(torch.arange(AMAX_BINS)).double().numpy()
    found = np.repeat(edges, counts[0, :-1].numpy())
    exact = np.sort(np.array(values))
    assert (exact < found).all() and (found <= exact * (1 + 1 / 32)).all()


def test_magnitudes_outside_of_the_range():
    counts = torch.zeros(1, AMAX_BINS + 1, dtype=torch.int64)
    count_amax(counts, [torch.tensor([[0.0], [1e-30], [2.0**32], [3e38]])])
    count_amax(counts, [torch.tensor([[torch.inf], [-torch.inf], [torch.nan], [-torch.nan]])])
    count_amax(counts, [torch.zeros(0, 4)])
    assert counts.nonzero()[:, 1].tolist() == [0, AMAX_BINS - 1, AMAX_BINS]
    assert counts[counts > 0].tolist() == [2, 2, 4]


def test_cells_that_do_not_fit_are_refused():
    x = torch.ones(2, 2)
    for slots in (torch.zeros(2), torch.zeros(1).double(), torch.zeros(1, 1)):
        with pytest.raises(UnsupportedError, match="need a contiguous float32 output"):
            amax_into(slots, [x])
    with pytest.raises(UnsupportedError, match="need a contiguous float32 output"):
        amax_into(torch.zeros(4)[::2], [x, x])
    for counts in (torch.zeros(1, AMAX_BINS, dtype=torch.int64), torch.zeros(1, AMAX_BINS + 1)):
        with pytest.raises(UnsupportedError, match="must be contiguous int64"):
            count_amax(counts, [x])

"""Magnitudes gathered over calls, against NumPy."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import amax_into


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


def test_cells_that_do_not_fit_are_refused():
    x = torch.ones(2, 2)
    for slots in (torch.zeros(2), torch.zeros(1).double(), torch.zeros(1, 1)):
        with pytest.raises(UnsupportedError, match="need a contiguous float32 output"):
            amax_into(slots, [x])
    with pytest.raises(UnsupportedError, match="need a contiguous float32 output"):
        amax_into(torch.zeros(4)[::2], [x, x])

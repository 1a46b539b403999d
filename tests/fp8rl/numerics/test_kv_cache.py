"""K and V as a cache of 8 bits holds them, in float64: E4M3 against a table of all its values,
INT8 against the nearest multiples of each row's step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import FP8_DTYPE, fake_quantize_int8_kv, fake_quantize_kv

_HALF = torch.arange(127, dtype=torch.uint8).view(FP8_DTYPE).double().numpy()
GRID = np.concatenate([-_HALF[:0:-1], _HALF])  # -448 to 448; the middle is 0
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def truth(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, int]:
    """The nearest values ``code * scale`` to ``x``, ties to the even code, and those clipped."""
    scaled = (x.float().numpy() / np.float32(scale)).astype(np.float64)
    above = np.searchsorted(GRID, scaled).clip(1, len(GRID) - 1)
    low, high = GRID[above - 1], GRID[above]
    even = np.where((above - 127) % 2 == 0, low, high)  # low's code is above - 127, with its sign
    nearest = np.where(scaled - low < high - scaled, low, high)
    nearest = np.where(scaled - low == high - scaled, even, nearest)
    nearest = np.where(np.abs(scaled) >= 448, np.sign(scaled) * 448, nearest)
    back = torch.from_numpy((nearest * np.float64(np.float32(scale))).astype(np.float32))
    return back.to(x.dtype), int((np.abs(scaled) > 448).sum())


def run(k: torch.Tensor, v: torch.Tensor, scales: tuple[float, float]):
    clipped = torch.tensor([3, 5])
    found = fake_quantize_kv(k, v, torch.tensor(scales), clipped)
    return found, (clipped - torch.tensor([3, 5])).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_nearest_values_of_the_table(dtype):
    g = torch.Generator().manual_seed(0)
    k = (torch.randn(40, 2, 3, 16, generator=g) * torch.randn(40, 2, 3, 1, generator=g).exp()).to(
        dtype
    )
    v = torch.randn(17, 8, generator=g).to(dtype)
    found, clipped = run(k, v, (0.011, 0.0017))
    for x, source, scale, count in zip(found, (k, v), (0.011, 0.0017), clipped, strict=True):
        expected, expected_count = truth(source, scale)
        assert torch.equal(x, expected) and x.dtype == dtype and x.is_contiguous()
        assert count == expected_count > 0


@given(st.floats(2.0**-50, 2.0**50, width=32), st.floats(-600, 600, width=32))
@settings(max_examples=200, deadline=None)
def test_any_scale(scale, times):
    x = torch.tensor([[times * scale, times / 7 * scale, times / 1e5 * scale]])
    found, clipped = run(x, x.bfloat16(), (scale, scale))
    for got, source, count in zip(found, (x, x.bfloat16()), clipped, strict=True):
        expected, expected_count = truth(source, scale)
        assert torch.equal(got, expected) and count == expected_count


def test_power_of_two_scales_are_exact_and_a_second_time_changes_nothing():
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    (once, _), _ = run(x, x, (2.0**-6, 2.0**-6))
    codes = once.double() * 2**6
    assert np.isin(codes.numpy(), GRID).all()
    (twice, _), clipped = run(once, once, (2.0**-6, 2.0**-6))
    assert torch.equal(once, twice) and clipped == [0, 0]


def test_float16_stays_finite_where_the_nearest_code_is_beyond_its_range():
    x = torch.tensor([[65504.0, -65504.0, 60000.0, torch.nan]], dtype=torch.float16)
    found, clipped = run(x, x.float(), (256.0, 256.0))
    assert found[0][0, :3].tolist() == [65504.0, -65504.0, 61440.0] and found[0][0, 3].isnan()
    assert found[1][0, :3].tolist() == [65536.0, -65536.0, 61440.0]
    assert clipped == [0, 0]


def test_slices_of_a_packed_projection_and_what_is_not_finite():
    packed = torch.randn(5, 2, 4, 3, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    k, v = packed[..., 1, :], packed[..., 2, :]
    found, _ = run(k, v, (0.02, 0.03))
    assert all(
        torch.equal(x, y)
        for x, y in zip(found, run(k.contiguous(), v.contiguous(), (0.02, 0.03))[0], strict=True)
    )
    bad = torch.tensor([[torch.inf, -torch.inf, torch.nan, -0.0]])
    (x, _), clipped = run(bad, bad, (0.5, 0.5))
    assert x[0, :2].tolist() == [224.0, -224.0] and x[0, 2].isnan() and clipped == [2, 2]
    assert torch.signbit(x[0, 3])


def test_what_does_not_fit_is_refused():
    x, counts = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match="Cannot quantize a tensor of dtype"):
        fake_quantize_kv(x, x.double(), torch.ones(2), counts)
    for scales, clipped in (
        (torch.ones(2).double(), counts),
        (torch.ones(1), counts),
        (torch.ones(2), counts.int()),
        (torch.ones(2), torch.zeros(4, dtype=torch.int64)[::2]),
    ):
        with pytest.raises(UnsupportedError, match="of K and V must be contiguous"):
            fake_quantize_kv(x, x, scales, clipped)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_within_half_a_step_of_each_row(dtype):
    g = torch.Generator().manual_seed(3)
    sizes = torch.rand(9, 4, 2, 1, generator=g).mul(16).sub(6).exp2()
    k = (torch.randn(9, 4, 2, 64, generator=g) * sizes).to(dtype)
    v = torch.randn(17, 16, generator=g).to(dtype)
    for x, source in zip(fake_quantize_int8_kv(k, v), (k, v), strict=True):
        assert x.dtype == dtype and x.shape == source.shape and x.is_contiguous()
        exact = source.double()
        step = exact.abs().amax(-1, keepdim=True) / 127
        rounding = torch.finfo(dtype).eps / 2
        error = (x.double() - exact).abs()
        assert (error <= 0.50001 * step + rounding * x.double().abs()).all()
        assert ((error / step).amax(-1) > 0.4).double().mean() > 0.9  # and no finer steps
        codes = x.double() / step
        assert ((codes - codes.round()).abs() <= codes.abs() * (rounding + 1e-6) + 1e-3).all()


def test_ties_of_int8_go_up_and_rows_of_zeros_stay_zeros():
    x = torch.zeros(4, 8)
    x[0, :6] = torch.tensor([127.0, -127.0, 2.5, -2.5, 0.49, 0.5])
    x[1, :2] = torch.tensor([1e-6, 3.4e-6])
    x[2, 0] = 63.5
    found, _ = fake_quantize_int8_kv(x, x)
    assert found[0, :6].tolist() == [127.0, -127.0, 3.0, -2.0, 0.0, 1.0]
    assert torch.allclose(found[1, :2], torch.tensor([1e-6, 3e-6]), rtol=1e-6)
    assert found[2].tolist() == [63.5, *[0.0] * 7] and not found[3].any()


def test_a_row_in_int8_with_a_value_that_is_not_finite_is_nan():
    x = torch.ones(4, 8).bfloat16()
    x[0, 3], x[1, 7], x[2, 0] = torch.nan, torch.inf, -torch.inf
    for found in fake_quantize_int8_kv(x, x[None]):
        assert found[..., :3, :].isnan().all() and (found[..., 3, :] == 1).all()


def test_int8_of_slices_and_of_nothing_and_what_is_refused():
    packed = torch.randn(5, 2, 4, 3, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    k, v = packed[..., 1, :], packed[..., 2, :]
    found, copies = fake_quantize_int8_kv(k, v), fake_quantize_int8_kv(k.clone(), v.clone())
    assert all(torch.equal(x, y) for x, y in zip(found, copies, strict=True))
    assert [x.shape for x in fake_quantize_int8_kv(k[:0], v[:0])] == [k[:0].shape] * 2
    with pytest.raises(UnsupportedError, match="Cannot quantize a tensor of dtype"):
        fake_quantize_int8_kv(k, v.double())

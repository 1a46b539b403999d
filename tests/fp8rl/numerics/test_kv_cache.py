"""K and V as a cache of 8 bits holds them, in float64: E4M3 against a table of all its values,
INT8 against the nearest multiples of each row's step; the kernel against the same values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8rl.numerics import FP8_DTYPE, fake_quantize_int8_kv, reference
from support.devices import INTERPRETED, Device
from support.shapes import DTYPES, PACKED, packed

_HALF = torch.arange(127, dtype=torch.uint8).view(FP8_DTYPE).double().numpy()
GRID = np.concatenate([-_HALF[:0:-1], _HALF])  # -448 to 448; the middle is 0


def truth(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, int]:
    """The nearest ``code * scale`` to ``x`` in float32, ties to even codes, and how many clip."""
    with np.errstate(all="ignore"):
        scaled = (x.float().numpy() / np.float32(scale)).astype(np.float64)
    above = np.searchsorted(GRID, scaled).clip(1, len(GRID) - 1)
    low, high = GRID[above - 1], GRID[above]
    even = np.where((above - 127) % 2 == 0, low, high)  # low's code is above - 127, with its sign
    nearest = np.where(scaled - low < high - scaled, low, high)
    nearest = np.where(scaled - low == high - scaled, even, nearest)
    nearest = np.where(np.abs(scaled) >= 448, np.sign(scaled) * 448, nearest)
    nearest = np.where(np.isnan(scaled), np.nan, np.copysign(nearest, scaled))
    back = torch.from_numpy((nearest * np.float64(np.float32(scale))).astype(np.float32))
    return back, int((np.abs(scaled) > 448).sum())


def rounded(wide: torch.Tensor, dtype: torch.dtype, *, triton: bool) -> torch.Tensor:
    """To the dtype; the interpreter truncates float32 to bfloat16, and float16 stays finite."""
    if triton and INTERPRETED and dtype == torch.bfloat16:
        return wide.view(torch.int32).bitwise_and(-0x10000).view(torch.float32).bfloat16()
    most = torch.finfo(dtype).max
    return wide.clamp(-most, most).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The bits are equal, up to those of NaN."""
    assert found.is_contiguous() and found.shape == expected.shape
    assert found.dtype == expected.dtype
    found, nan = found.cpu(), expected.isnan()
    assert torch.equal(found.isnan(), nan)
    width = torch.int16 if found.element_size() == 2 else torch.int32
    assert torch.equal(found.view(width)[~nan], expected.contiguous().view(width)[~nan])


def check(
    device: Device, k: torch.Tensor, v: torch.Tensor, scales=(0.0131, 0.0217), in_place=None
) -> None:
    """Values and counts, twice over the same counts; these of them the kernel reads in place."""
    cache = device.module("kv_cache")
    table = torch.tensor(scales, device=device.at)
    counts, expected = torch.zeros(2, dtype=torch.int64, device=device.at), [0, 0]
    pair = device.moved(k), device.moved(v)
    for _ in range(2):
        found = cache.fake_quantize_kv(*pair, table, counts)
        for side, (got, source, scale) in enumerate(zip(found, (k, v), scales, strict=True)):
            wide, clipped = truth(source, scale)
            same(got, rounded(wide, source.dtype, triton=device.triton))
            expected[side] += clipped
    assert counts.tolist() == expected
    if device.triton and in_place is not None:
        assert tuple(cache._rows(x).x.data_ptr() == x.data_ptr() for x in pair) == in_place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PACKED)
def test_slices_of_a_packed_projection(device, shape, dtype):
    _, k, v = packed(*shape, dtype)
    check(device, k, v, in_place=(True, True))
    check(device, k.contiguous(), v)  # after norm and rotary embedding k is a tensor of its own
    if shape[1] == 1:
        check(device, k[:, 0], v[:, 0])  # packed sequences: [tokens, groups, head]


def test_orders_of_dimensions_odd_sizes_and_what_is_not_finite(device):
    x = torch.randn(5, 6, 7, 9, generator=torch.Generator().manual_seed(0))
    check(device, x, x[0, 0, 0])
    check(device, x[..., :3], x.transpose(0, 2), in_place=(True, False))
    check(device, x[:, :3, 1:3], x[..., ::2], in_place=(False, False))
    check(device, x[:0], x)
    x[0, 1, 2, 3], x[1, 0, 3, 4], x[3, 1, 5, 6] = torch.nan, torch.inf, -torch.inf
    for dtype in DTYPES:
        check(device, x.to(dtype), x.to(dtype)[:3], (0.25, 2.0**-50))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_every_tie_and_what_saturates(device, dtype):
    """All values between two codes that the dtype has, up to beyond the largest one."""
    if dtype == torch.float32:
        bits = torch.arange(0x3A000000, 0x44200000, 0x8001, dtype=torch.int32)
        x = torch.cat((bits, bits & -0x10000, (bits & -0x10000) + 1)).view(dtype)
    else:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.cat((x, -x))
    for scale in (1.0, 2.0**-7, 0.0131, 3.7, 256.0):
        check(device, x, x * scale, (scale, scale))


def check_int8(device: Device, k: torch.Tensor, v: torch.Tensor) -> None:
    """Within half a step of each row; the kernel to the bit as the reference."""
    expected = reference.fake_quantize_int8_kv(k, v)
    if device.triton:
        if INTERPRETED:
            wide = reference.fake_quantize_int8_kv(k.float(), v.float())
            expected = [rounded(w, x.dtype, triton=True) for w, x in zip(wide, (k, v), strict=True)]
        found = device.module("kv_cache").fake_quantize_int8_kv(device.moved(k), device.moved(v))
        for got, want in zip(found, expected, strict=True):
            same(got, want)
        return
    for x, source in zip(expected, (k, v), strict=True):
        assert x.dtype == source.dtype and x.shape == source.shape and x.is_contiguous()
        exact, info = source.double(), torch.finfo(source.dtype)
        step = exact.abs().amax(-1, keepdim=True) / 127
        error = (x.double() - exact).abs()
        rounding = (x.double().abs() * info.eps).clamp(min=info.smallest_normal * info.eps) / 2
        finite = step.isfinite().expand_as(error)
        assert (error <= 0.50001 * step + rounding)[finite].all()
        assert x[~finite].isnan().all()
        codes = torch.where(step > 0, x.double() / step, 0.0)
        off = (codes - codes.round()).abs() * step
        assert (off <= rounding + 1e-6 * x.double().abs() + 1e-3 * step)[finite].all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PACKED)
def test_int8_of_slices_copies_and_nothing(device, shape, dtype):
    _, k, v = packed(*shape, dtype)
    check_int8(device, k, v)
    check_int8(device, k.contiguous(), v[:0])
    check_int8(device, v.transpose(0, 2), k[0, 0, 0])
    k = k.clone()
    k[0, 0, 0, 5] = torch.nan
    check_int8(device, k, v)
    halves = torch.cat((torch.arange(-254, 255) / 2, torch.zeros(3)))
    rows = halves * torch.tensor([[1.0], [2.0**-9], [0.37], [2e4]])
    check_int8(device, rows.to(dtype), rows[:2].to(dtype))


def test_ties_of_int8_go_up_and_rows_of_zeros_stay_zeros():
    x = torch.zeros(4, 8)
    x[0, :6] = torch.tensor([127.0, -127.0, 2.5, -2.5, 0.49, 0.5])
    x[1, :2] = torch.tensor([1e-6, 3.4e-6])
    x[2, 0] = 63.5
    found, _ = fake_quantize_int8_kv(x, x)
    assert found[0, :6].tolist() == [127.0, -127.0, 3.0, -2.0, 0.0, 1.0]
    assert torch.allclose(found[1, :2], torch.tensor([1e-6, 3e-6]), rtol=1e-6)
    assert found[2].tolist() == [63.5, *[0.0] * 7] and not found[3].any()

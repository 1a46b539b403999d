"""Triton kernel of :func:`fp8rl.numerics.fake_quantize_kv` and ``fake_quantize_int8_kv``.

K and V are read and written once, in one launch. Values are rounded to E4M3 as float32, so no code
is formed and no cast to FP8 is needed. The results equal those of the reference bit for bit, up to
the bits of NaN.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import LEAST_INT8_SCALE, cdiv

_TILE, _WARPS = 8192, 8  # elements of a program: 32 of each thread


@triton.jit
def round_to_e4m3(scaled):
    """Round float32 to the nearest E4M3 value; larger magnitudes become 448, NaN stays."""
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    # Three bits of the mantissa stay, to nearest even.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) & -0x100000
    # Adding 2**14, whose unit in the last place is 2**-9, rounds to E4M3's subnormal grid.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0) - 16384.0
    rounded = tl.where(magnitude < 0x3C800000, small.to(tl.int32, bitcast=True), normal)  # 2**-6
    signed = (rounded | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    return tl.where(scaled == scaled, signed, scaled)


@triton.jit
def quantize_int8_rows(rows, LEAST: tl.constexpr):
    """Return the INT8 codes of rows ``[n, width]``, with 128 added (uint8), and their scales.

    A row with a value that is not finite has the scale NaN. ``LEAST`` is the smallest scale.
    """
    rows = rows.to(tl.float32)
    largest = tl.max(tl.abs(rows), 1)
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), LEAST)
    scale += tl.sum(rows * 0.0, 1)  # the maximum passes over NaN
    scaled = tl.div_rn(rows, tl.full(rows.shape, 1.0, tl.float32) * scale[:, None])
    return (scaled + 128.5).to(tl.uint8), scale


@triton.jit
def _tile(
    x_ptr,
    out_ptr,
    scale_ptr,
    clipped_ptr,
    extent,
    tile,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    INT8: tl.constexpr,
):
    rows, width, stride = extent
    first = tile.to(tl.int64) * HEIGHT
    row = tl.arange(0, HEIGHT)
    col = tl.arange(0, WIDTH)
    inside = (row < rows - first)[:, None] & (col < width)[None, :]
    at = first * stride + row[:, None] * stride + col[None, :]
    x = tl.load(x_ptr + at, inside, other=0.0)
    if INT8:
        codes, scale = quantize_int8_rows(x, LEAST)
        y = (codes.to(tl.float32) - 128.0) * scale[:, None]
    else:
        scale = tl.load(scale_ptr)
        scaled = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 1.0, tl.float32) * scale)
        count = tl.sum((tl.abs(scaled) > 448.0).to(tl.int32))
        if count > 0:
            tl.atomic_add(clipped_ptr, count.to(tl.int64), sem="relaxed")
        y = round_to_e4m3(scaled) * scale
    if x.dtype == tl.float16:
        y = tl.where(y > 65504.0, 65504.0, tl.where(y < -65504.0, -65504.0, y))  # NaN stays
    y = y.to(x.dtype)
    tl.store(out_ptr + first * width + row[:, None] * width + col[None, :], y, inside)


@triton.jit(do_not_specialize=["rows_k", "rows_v", "tiles_k"])
def _fake_quantize_kernel(
    k_ptr,
    k_out_ptr,
    rows_k,
    width_k,
    stride_k,
    v_ptr,
    v_out_ptr,
    rows_v,
    width_v,
    stride_v,
    scales_ptr,
    clipped_ptr,
    tiles_k,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
    INT8: tl.constexpr,
):
    """Fake-quantize some rows of K, or of V in programs from ``tiles_k`` on.

    For INT8, whose scales are the rows' own, pointers to scales and counts are those of ``k``.
    """
    tile = tl.program_id(0)
    if tile < tiles_k:
        size = (rows_k, width_k, stride_k)
        _tile(k_ptr, k_out_ptr, scales_ptr, clipped_ptr, size, tile, HEIGHT, WIDTH, LEAST, INT8)
    else:
        size = (rows_v, width_v, stride_v)
        tile -= tiles_k
        scale, count = scales_ptr + 1, clipped_ptr + 1
        _tile(v_ptr, v_out_ptr, scale, count, size, tile, HEIGHT, WIDTH, LEAST, INT8)


class _Rows(NamedTuple):
    """A tensor as rows of its last dimension, equally far apart."""

    x: torch.Tensor
    rows: int
    width: int
    stride: int


def _rows(x: torch.Tensor) -> _Rows:
    """See ``x`` as rows; other strides than those of a slice of packed rows are copied first."""
    width = x.shape[-1]
    leading = [dim for dim in zip(x.shape[:-1], x.stride()[:-1], strict=True) if dim[0] != 1]
    apart = any(step != size * next_ for (_, step), (size, next_) in pairwise(leading))
    if apart or x.stride(-1) != 1:
        x, leading = x.contiguous(), []
    stride = leading[-1][1] if leading else width
    return _Rows(x, x.numel() // width if width else 0, width, stride)


def fake_quantize_kv(
    k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, clipped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_quantize(k, v, scales, clipped, int8=False)


def fake_quantize_int8_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_quantize(k, v, k, k, int8=True)


def _fake_quantize(
    k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, clipped: torch.Tensor, *, int8: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    of_k, of_v = _rows(k), _rows(v)
    outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v)]
    width = triton.next_power_of_2(max(of_k.width, of_v.width, 1))
    height = max(_TILE // width, 1)
    tiles_k, tiles_v = cdiv(of_k.rows, height), cdiv(of_v.rows, height)
    if tiles_k + tiles_v:
        with torch.cuda.device_of(k):
            _fake_quantize_kernel[(tiles_k + tiles_v,)](
                of_k.x,
                outs[0],
                of_k.rows,
                of_k.width,
                of_k.stride,
                of_v.x,
                outs[1],
                of_v.rows,
                of_v.width,
                of_v.stride,
                scales,
                clipped,
                tiles_k,
                HEIGHT=height,
                WIDTH=width,
                LEAST=LEAST_INT8_SCALE,
                INT8=int8,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
    return outs[0], outs[1]

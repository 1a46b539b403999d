"""Triton kernel of :func:`fp8rl.numerics.amax_into`.

Magnitudes are compared as integers, by their bits: an infinity is larger than all numbers, and a
NaN larger than an infinity. The order in which programs finish changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8rl.numerics import reference
from fp8rl.numerics.formats import SOURCE_DTYPES, cdiv

_TENSORS = 3  # of one launch: q, k and v
_HEIGHT, _WIDTH, _WARPS = 64, 128, 4  # of a tile


class _Rows(NamedTuple):
    """Where a tensor's elements lie: contiguous rows, equally far apart."""

    rows: int
    width: int
    stride: int


_NO_ROWS = _Rows(0, _WIDTH, _WIDTH)


def _merged(dims: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Merge dimensions ``(stride, size)`` into one ``(elements, stride)``; None if impossible."""
    dims = sorted(dim for dim in dims if dim[1] > 1)
    if not dims:
        return 1, 0
    stride, count = dims[0]
    for next_stride, size in dims[1:]:
        if next_stride != stride * count:
            return None
        count *= size
    return count, stride


@triton.jit
def _amax_tile(out_ptr, x_ptr, extent, tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    rows, width, stride = extent
    across = tl.cdiv(width, WIDTH)
    first_row = (tile // across).to(tl.int64) * HEIGHT
    first_col = (tile % across) * WIDTH
    row = tl.arange(0, HEIGHT)
    col = tl.arange(0, WIDTH)
    inside = (row < rows - first_row)[:, None] & (col < width - first_col)[None, :]
    at = x_ptr + first_row * stride + first_col + row[:, None] * stride + col[None, :]
    x = tl.load(at, inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax_ptr = out_ptr.to(tl.pointer_type(tl.int32))
    tl.atomic_max(amax_ptr, tl.max(bits), sem="relaxed")


@triton.jit(do_not_specialize=["rows_0", "rows_1", "rows_2", "end_0", "end_1"])
def _amax_kernel(
    out_ptr,
    x_0,
    rows_0,
    width_0,
    stride_0,
    x_1,
    rows_1,
    width_1,
    stride_1,
    x_2,
    rows_2,
    width_2,
    stride_2,
    end_0,
    end_1,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Reduce one tile of one of three tensors, whose outputs follow each other."""
    tile = tl.program_id(0)
    if tile < end_0:
        extent = (rows_0, width_0, stride_0)
        _amax_tile(out_ptr, x_0, extent, tile, HEIGHT, WIDTH)
    elif tile < end_1:
        extent = (rows_1, width_1, stride_1)
        _amax_tile(out_ptr + 1, x_1, extent, tile - end_0, HEIGHT, WIDTH)
    else:
        extent = (rows_2, width_2, stride_2)
        _amax_tile(out_ptr + 2, x_2, extent, tile - end_1, HEIGHT, WIDTH)


def amax_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) == _TENSORS:  # the usual case, without the cost of slicing on the host
        _launch_few(out, tensors)
        return
    for start in range(0, len(tensors), _TENSORS):
        few = slice(start, start + _TENSORS)
        _launch_few(out[few], tensors[few])


def _launch_few(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    plan = _plan(tuple((x.shape, x.stride(), x.dtype) for x in tensors))
    for number in plan.not_served:
        one = slice(number, number + 1)
        reference.amax_into(out[one], tensors[one])
    if plan.programs:
        x_0, x_1, x_2 = (*tensors, *[tensors[-1]] * (_TENSORS - len(tensors)))
        rows_0, rows_1, rows_2 = plan.rows
        with torch.cuda.device_of(out):
            _amax_kernel[(plan.programs,)](
                out,
                x_0,
                *rows_0,
                x_1,
                *rows_1,
                x_2,
                *rows_2,
                *plan.ends,
                HEIGHT=_HEIGHT,
                WIDTH=_WIDTH,
                num_warps=_WARPS,
            )


class _Plan(NamedTuple):
    """The launch for tensors of given shapes, strides and dtypes."""

    programs: int
    rows: tuple[_Rows, ...]
    """Rows of the three tensors."""
    ends: tuple[int, int]
    """Numbers of the programs after the first and after the second tensor."""
    not_served: tuple[int, ...]
    """Indices of tensors that cannot be seen as rows; the reference takes them."""


@lru_cache(maxsize=256)  # computing a plan costs the host more than the launch
def _plan(layouts: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]) -> _Plan:
    found = [_rows(*layout) for layout in layouts]
    rows = [of_one or _NO_ROWS for of_one in found] + [_NO_ROWS] * (_TENSORS - len(found))
    end_0, end_1, end_2 = accumulate(cdiv(n, _HEIGHT) * cdiv(w, _WIDTH) for n, w, _ in rows)
    not_served = tuple(number for number, of_one in enumerate(found) if of_one is None)
    return _Plan(end_2, tuple(rows), (end_0, end_1), not_served)


def _rows(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> _Rows | None:
    """Return the tensor as rows in the order of memory, which does not matter for a maximum.

    None where the kernel does not serve its strides or dtype.
    """
    if not shape.numel():
        return _NO_ROWS
    if dtype not in SOURCE_DTYPES:
        return None
    dims = sorted(zip(strides, shape, strict=True))
    width = 1
    while dims and (dims[0][0] == width or dims[0][1] == 1):
        width *= dims.pop(0)[1]
    rows = _merged(dims)
    if rows is None or (width == 1 and dims):
        return None
    if rows[0] == 1:
        divisor = gcd(width, _WIDTH)
        return _Rows(width // divisor, divisor, divisor)
    return _Rows(rows[0], width, rows[1])

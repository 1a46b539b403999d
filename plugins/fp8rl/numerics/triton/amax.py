"""Triton kernel of :func:`fp8rl.numerics.amax_into` and :func:`fp8rl.numerics.count_amax`.

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
from fp8rl.numerics.formats import AMAX_BINS, AMAX_FIRST, AMAX_SHIFT, SOURCE_DTYPES, cdiv

_TENSORS = 3  # of one launch: q, k and v
_HEIGHT, _WIDTH, _WARPS = 64, 128, 4  # of a tile; the tiles of a histogram hold whole rows
_WIDEST = 1024  # columns of a row that a histogram can take
_FIRST = tl.constexpr(AMAX_FIRST)
_SHIFT = tl.constexpr(AMAX_SHIFT)
_BINS = tl.constexpr(AMAX_BINS)


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


def _any_rows(shape: torch.Size, strides: tuple[int, ...]) -> _Rows | None:
    """A tensor as rows in the order of memory, which does not matter for a maximum."""
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


def _last_rows(shape: torch.Size, strides: tuple[int, ...]) -> _Rows | None:
    """A tensor as the rows of its last dimension."""
    rows = _merged(list(zip(strides[:-1], shape[:-1], strict=True)))
    if rows is None or (strides[-1] != 1 and shape[-1] > 1) or shape[-1] > _WIDEST:
        return None
    return _Rows(rows[0], shape[-1], rows[1])


@triton.jit
def _amax_tile(
    out_ptr,
    x_ptr,
    extent,
    tile,
    PER_ROW: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    rows, width, stride = extent
    across = tl.cdiv(width, WIDTH)
    first_row = (tile // across).to(tl.int64) * HEIGHT
    first_col = (tile % across) * WIDTH
    row = tl.arange(0, HEIGHT)
    col = tl.arange(0, WIDTH)
    here = row < rows - first_row
    inside = here[:, None] & (col < width - first_col)[None, :]
    at = x_ptr + first_row * stride + first_col + row[:, None] * stride + col[None, :]
    x = tl.load(at, inside, other=0.0).to(tl.float32)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if PER_ROW:
        amax = tl.max(bits, 1)
        bins = tl.minimum(tl.maximum((amax >> _SHIFT) - _FIRST, 0), _BINS - 1)
        bins = tl.where(amax < 0x7F800000, bins, _BINS)
        one = tl.full((HEIGHT,), 1, tl.int64)
        tl.atomic_add(out_ptr + bins, one, here, sem="relaxed")
    else:
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
    OUT_STRIDE: tl.constexpr,
    PER_ROW: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Reduce one tile of one of three tensors; their outputs are ``OUT_STRIDE`` values apart."""
    tile = tl.program_id(0)
    if tile < end_0:
        extent = (rows_0, width_0, stride_0)
        _amax_tile(out_ptr, x_0, extent, tile, PER_ROW, HEIGHT, WIDTH)
    elif tile < end_1:
        extent = (rows_1, width_1, stride_1)
        _amax_tile(out_ptr + OUT_STRIDE, x_1, extent, tile - end_0, PER_ROW, HEIGHT, WIDTH)
    else:
        extent = (rows_2, width_2, stride_2)
        _amax_tile(out_ptr + 2 * OUT_STRIDE, x_2, extent, tile - end_1, PER_ROW, HEIGHT, WIDTH)


def amax_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """See :func:`fp8rl.numerics.amax_into`."""
    _launch_all(out, tensors, per_row=False)


def count_amax(counts: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """See :func:`fp8rl.numerics.count_amax`."""
    _launch_all(counts, tensors, per_row=True)


def _launch_all(out: torch.Tensor, tensors: Sequence[torch.Tensor], *, per_row: bool) -> None:
    if len(tensors) == _TENSORS:  # the usual case, without the cost of slicing on the host
        _launch_few(out, tensors, per_row)
        return
    for start in range(0, len(tensors), _TENSORS):
        few = slice(start, start + _TENSORS)
        _launch_few(out[few], tensors[few], per_row)


def _launch_few(out: torch.Tensor, tensors: Sequence[torch.Tensor], per_row: bool) -> None:
    plan = _plan(tuple((x.shape, x.stride(), x.dtype) for x in tensors), per_row)
    for number in plan.not_served:
        one = slice(number, number + 1)
        (reference.count_amax if per_row else reference.amax_into)(out[one], tensors[one])
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
                OUT_STRIDE=out.stride(0),
                PER_ROW=per_row,
                HEIGHT=plan.height,
                WIDTH=plan.width,
                num_warps=_WARPS,
            )


class _Plan(NamedTuple):
    """The launch for tensors of given shapes, strides and dtypes."""

    programs: int
    rows: tuple[_Rows, ...]
    """Rows of the three tensors."""
    ends: tuple[int, int]
    """Numbers of the programs after the first and after the second tensor."""
    height: int
    width: int
    not_served: tuple[int, ...]
    """Indices of tensors that cannot be seen as rows; the reference takes them."""


@lru_cache(maxsize=256)  # computing a plan costs the host more than the launch
def _plan(
    layouts: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...], per_row: bool
) -> _Plan:
    found = [_rows(*layout, per_row) for layout in layouts]
    widest = max((rows.width for rows in found if rows), default=1)
    width = triton.next_power_of_2(widest) if per_row else _WIDTH
    height = _HEIGHT * _WIDTH // width
    rows = [of_one or _NO_ROWS for of_one in found] + [_NO_ROWS] * (_TENSORS - len(found))
    end_0, end_1, end_2 = accumulate(cdiv(n, height) * cdiv(w, width) for n, w, _ in rows)
    not_served = tuple(number for number, of_one in enumerate(found) if of_one is None)
    return _Plan(end_2, tuple(rows), (end_0, end_1), height, width, not_served)


def _rows(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, per_row: bool
) -> _Rows | None:
    """The tensor as rows; None where the kernel does not serve its strides or dtype."""
    if not shape.numel():
        return _NO_ROWS
    if dtype not in SOURCE_DTYPES:
        return None
    return _last_rows(shape, strides) if per_row else _any_rows(shape, strides)

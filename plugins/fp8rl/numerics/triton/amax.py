"""Triton kernel of :func:`fp8rl.numerics.amax_into` and :func:`fp8rl.numerics.count_amax`.

Magnitudes are compared as the integers that their bits are: an infinity is larger than all numbers
and a NaN larger than that, and the order in which programs finish changes nothing.
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
from fp8rl.numerics.formats import AMAX_BINS, PEAK_FIRST, PEAK_SHIFT, SOURCE_DTYPES, cdiv
from fp8rl.numerics.triton.launch import Launcher

_TOGETHER = 3  # tensors of a launch: q, k and v
_HEIGHT, _WIDTH, _WARPS = 64, 128, 4  # of a tile, but for histograms, whose tiles hold whole rows
_WIDEST = 1024  # row of a histogram


class _Rows(NamedTuple):
    """Where a tensor's elements lie: contiguous rows, equally far apart."""

    rows: int
    width: int
    stride: int


_NO_ROWS = _Rows(0, _WIDTH, _WIDTH)


def _merged(dims: list[tuple[int, int]]) -> tuple[int, int] | None:
    """``(elements, stride)`` that visit what dimensions of ``(stride, size)`` do, if one can."""
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
    """A tensor as rows, in the order of memory: it does not matter for a maximum."""
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
def _take_tile(
    cells_ptr,
    x_ptr,
    rows,
    width,
    stride,
    tile,
    PER_ROW: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
):
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
        peaks = tl.max(bits, 1)
        bins = tl.minimum(tl.maximum((peaks >> SHIFT) - FIRST, 0), BINS - 1)
        bins = tl.where(peaks < 0x7F800000, bins, BINS)
        one = tl.full((HEIGHT,), 1, tl.int64)
        tl.atomic_add(cells_ptr + bins, one, here, sem="relaxed")
    else:
        slot = cells_ptr.to(tl.pointer_type(tl.int32))
        tl.atomic_max(slot, tl.max(bits), sem="relaxed")


@triton.jit(do_not_specialize=["rows_0", "rows_1", "rows_2", "end_0", "end_1"])
def _peaks_kernel(
    cells_ptr,
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
    CELLS: tl.constexpr,
    PER_ROW: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    BINS: tl.constexpr,
):
    """One tile of one of three tensors a program; each tensor has ``CELLS`` cells."""
    tile = tl.program_id(0)
    if tile < end_0:
        _take_tile(
            cells_ptr,
            x_0,
            rows_0,
            width_0,
            stride_0,
            tile,
            PER_ROW,
            HEIGHT,
            WIDTH,
            FIRST,
            SHIFT,
            BINS,
        )
    elif tile < end_1:
        _take_tile(
            cells_ptr + CELLS,
            x_1,
            rows_1,
            width_1,
            stride_1,
            tile - end_0,
            PER_ROW,
            HEIGHT,
            WIDTH,
            FIRST,
            SHIFT,
            BINS,
        )
    else:
        _take_tile(
            cells_ptr + 2 * CELLS,
            x_2,
            rows_2,
            width_2,
            stride_2,
            tile - end_1,
            PER_ROW,
            HEIGHT,
            WIDTH,
            FIRST,
            SHIFT,
            BINS,
        )


_launch = Launcher(_peaks_kernel, num_warps=_WARPS)


def amax_into(slots: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """See :func:`fp8rl.numerics.amax_into`."""
    _take(slots, tensors, per_row=False)


def count_amax(counts: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """See :func:`fp8rl.numerics.count_amax`."""
    _take(counts, tensors, per_row=True)


def _take(cells: torch.Tensor, tensors: Sequence[torch.Tensor], *, per_row: bool) -> None:
    if len(tensors) == _TOGETHER:  # as always; slices of cells cost the host a part of a launch
        _take_few(cells, tensors, per_row)
        return
    for start in range(0, len(tensors), _TOGETHER):
        few = slice(start, start + _TOGETHER)
        _take_few(cells[few], tensors[few], per_row)


def _take_few(cells: torch.Tensor, tensors: Sequence[torch.Tensor], per_row: bool) -> None:
    plan = _plan(tuple((x.shape, x.stride(), x.dtype) for x in tensors), per_row)
    for number in plan.not_served:
        one = slice(number, number + 1)
        (reference.count_amax if per_row else reference.amax_into)(cells[one], tensors[one])
    if plan.programs:
        x_0, x_1, x_2 = (*tensors, *[tensors[-1]] * (_TOGETHER - len(tensors)))
        rows_0, rows_1, rows_2 = plan.rows
        arguments = (cells, x_0, *rows_0, x_1, *rows_1, x_2, *rows_2, *plan.ends)
        tile = (plan.height, plan.width)
        constants = (cells.stride(0), per_row, *tile, PEAK_FIRST, PEAK_SHIFT, AMAX_BINS)
        _launch(plan.programs, arguments, constants)


class _Plan(NamedTuple):
    """A launch over tensors that lie in memory in a certain way."""

    programs: int
    rows: tuple[_Rows, ...]
    """Of three tensors."""
    ends: tuple[int, int]
    """Of the programs of the first two."""
    height: int
    width: int
    not_served: tuple[int, ...]
    """Tensors that are no rows."""


@lru_cache(maxsize=256)  # to find this out costs the host more than the launch
def _plan(
    layouts: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...], per_row: bool
) -> _Plan:
    found = [_rows(*layout, per_row) for layout in layouts]
    widest = max((rows.width for rows in found if rows), default=1)
    width = triton.next_power_of_2(widest) if per_row else _WIDTH
    height = _HEIGHT * _WIDTH // width
    rows = [of_one or _NO_ROWS for of_one in found] + [_NO_ROWS] * (_TOGETHER - len(found))
    end_0, end_1, end_2 = accumulate(cdiv(n, height) * cdiv(w, width) for n, w, _ in rows)
    not_served = tuple(number for number, of_one in enumerate(found) if of_one is None)
    return _Plan(end_2, tuple(rows), (end_0, end_1), height, width, not_served)


def _rows(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, per_row: bool
) -> _Rows | None:
    """None where the elements lie in a way that the kernel does not serve."""
    if not shape.numel():
        return _NO_ROWS
    if dtype not in SOURCE_DTYPES:
        return None
    return _last_rows(shape, strides) if per_row else _any_rows(shape, strides)

"""Triton kernels for the operands of many experts, one launch each.

Tiles are those of :mod:`fp8rl.numerics.triton_two_way`; a table tells each program which rows of
the source its tile holds, since every expert starts a tile of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp8rl.numerics._format import FP8_DTYPE, GROUP, Operand, Quantized, cdiv
from fp8rl.numerics._segments import ColumnSegments, RowSegments, Segments, on_device
from fp8rl.numerics.triton_kernels import has_native_cast
from fp8rl.numerics.triton_many import _TRITON_DTYPES, _aligned
from fp8rl.numerics.triton_two_way import _write_tile
from fp8rl.recipe import ScaleFormat

ALIGNMENT = GROUP
"""Rows of every expert are padded to a multiple of this."""
_REGISTERS = 80  # as in triton_two_way
_COPIED = 1024  # columns that one program of the copy moves


@triton.jit
def _load_rows(at, left, inside_cols, WHOLE: tl.constexpr):
    """128 rows of which ``left`` are there; the others are zeros."""
    row = tl.arange(0, 128)
    if WHOLE:
        if left == 128:  # noqa: SIM108 - without a mask, which costs instructions
            x = tl.load(at)
        else:
            x = tl.load(at, (row < left)[:, None], other=0.0)
    else:
        x = tl.load(at, (row < left)[:, None] & inside_cols[None, :], other=0.0)
    return x


@triton.jit
def _segments_kernel(
    x_ptr,
    table_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    scale_stride,
    scale_t_stride,
    tile_cols,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    entry = table_ptr + tile_row * 6
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    left = tl.load(entry + 1)
    x_ptr += tl.load(entry).to(tl.int64) * stride_row + tile_col * 128 * stride_col
    at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col
    inside_cols = col < cols - tile_col * 128
    if ROWWISE:
        _write_tile(
            _load_rows(at, left, inside_cols, WHOLE),
            tile_row,
            tile_col,
            codes_ptr,
            scale_inv_ptr,
            codes_t_ptr,
            scale_inv_t_ptr,
            rows,
            cols,
            rows,
            scale_stride,
            scale_t_stride,
            False,
            True,
            False,
            POW2,
            NATIVE,
            WHOLE,
        )
    if COLUMNWISE:
        tiles = tl.load(entry + 4).to(tl.int64)
        if tiles > 0:
            # The expert's own [cols, 128 * tiles], as if it were alone.
            first = tl.load(entry + 3).to(tl.int64)
            _write_tile(
                _load_rows(at, left, inside_cols, WHOLE),
                tl.load(entry + 5).to(tl.int64),
                tile_col,
                codes_ptr,
                scale_inv_ptr,
                codes_t_ptr + first * 128 * cols,
                scale_inv_t_ptr + first * scale_t_stride,
                tiles * 128,
                cols,
                tiles * 128,
                scale_stride,
                scale_t_stride,
                False,
                False,
                True,
                POW2,
                NATIVE,
                WHOLE,
            )


@triton.jit
def _weights_kernel(
    table_ptr,
    codes_ptr,
    scale_inv_ptr,
    rows,
    cols,
    tile_cols,
    scale_rows,
    scale_cols,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes of one 128x128 block, of the expert of the second program axis."""
    expert = tl.program_id(1).to(tl.int64)
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    x_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    at = x_ptr + tile_row * 128 * cols + tile_col * 128 + row[:, None] * cols + col[None, :]
    inside_cols = col < cols - tile_col * 128
    x = _load_rows(at, tl.minimum(rows - tile_row * 128, 128), inside_cols, WHOLE)
    codes_ptr += expert * rows * cols
    scale_inv_ptr += expert * scale_rows * scale_cols
    _write_tile(
        x,
        tile_row,
        tile_col,
        codes_ptr,
        scale_inv_ptr,
        codes_ptr,
        scale_inv_ptr,
        rows,
        cols,
        rows,
        scale_cols,
        scale_cols,
        True,
        ROWWISE,
        COLUMNWISE,
        POW2,
        NATIVE,
        WHOLE,
    )


@triton.jit
def _unpad_kernel(x_ptr, table_ptr, out_ptr, cols, STEP: tl.constexpr):
    """Copy the source rows of one tile of 128 padded rows, 16 at a time."""
    tile = tl.program_id(0).to(tl.int64)
    first = tl.load(table_ptr + tile * 6).to(tl.int64)
    left = tl.load(table_ptr + tile * 6 + 1)
    col = tl.program_id(1) * STEP + tl.arange(0, STEP)
    for begin in range(0, left, 16):
        row = begin + tl.arange(0, 16)
        inside = (row < left)[:, None] & (col < cols)[None, :]
        offset = row[:, None].to(tl.int64) * cols + col[None, :]
        x = tl.load(x_ptr + tile * 128 * cols + offset, inside)
        tl.store(out_ptr + first * cols + offset, x, inside)


def quantize_segments(
    x: torch.Tensor,
    segments: Segments,
    scale_format: ScaleFormat,
    rowwise: bool,
    columnwise: bool,
) -> tuple[RowSegments | None, ColumnSegments | None]:
    """See :func:`fp8rl.numerics.quantize_segments`."""
    cols, spare = x.shape[1], x
    rows, groups = segments.rows, cdiv(x.shape[1], GROUP)
    by_rows = by_columns = None
    if rowwise:
        scales = x.new_empty(groups, rows, dtype=torch.float32)
        by_rows = RowSegments(
            torch.empty(rows, cols, dtype=FP8_DTYPE, device=x.device), scales.t(), segments
        )
    if columnwise:
        end = segments.column_starts[-1]
        by_columns = ColumnSegments(
            torch.empty(end * cols, dtype=FP8_DTYPE, device=x.device),
            x.new_empty(segments.group_starts[-1], cols, dtype=torch.float32),
            segments,
        )
    if rows and cols:
        with torch.cuda.device_of(x):
            _segments_kernel[(rows // GROUP * groups,)](
                x,
                segments.table(x.device),
                by_rows.codes.view(torch.uint8) if by_rows else spare,
                by_rows.scale_inv if by_rows else spare,
                by_columns.codes.view(torch.uint8) if by_columns else spare,
                by_columns.scale_inv if by_columns else spare,
                rows,
                cols,
                *x.stride(),
                rows,
                cols,
                groups,
                ROWWISE=rowwise,
                COLUMNWISE=columnwise,
                POW2=scale_format == "pow2",
                NATIVE=has_native_cast(x.device),
                WHOLE=cols % GROUP == 0,
                num_warps=8,
                maxnreg=_REGISTERS,
                enable_fp_fusion=False,
            )
    return by_rows, by_columns


def quantize_weights(
    weights: Sequence[torch.Tensor], scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    """See :func:`fp8rl.numerics.quantize_weights`."""
    weights = [w.contiguous() for w in weights]
    first = weights[0]
    addresses = [w.data_ptr() for w in weights]
    table = on_device(torch.tensor(addresses, dtype=torch.int64), first.device)
    aligned = _aligned(addresses)

    def side(transposed: bool) -> Quantized:
        (rows, cols) = first.shape
        blocks = cdiv(rows, GROUP), cdiv(cols, GROUP)
        shape, grid = ((cols, rows), blocks[::-1]) if transposed else ((rows, cols), blocks)
        codes = torch.empty(len(weights), *shape, dtype=FP8_DTYPE, device=first.device)
        scale_inv = first.new_empty(len(weights), *grid, dtype=torch.float32)
        if first.numel():
            with torch.cuda.device_of(first):
                _weights_kernel[(blocks[0] * blocks[1], len(weights))](
                    table,
                    codes.view(torch.uint8),
                    scale_inv,
                    rows,
                    cols,
                    blocks[1],
                    *grid,
                    DTYPE=_TRITON_DTYPES[first.dtype],
                    ALIGNED=aligned,
                    ROWWISE=not transposed,
                    COLUMNWISE=transposed,
                    POW2=scale_format == "pow2",
                    NATIVE=has_native_cast(first.device),
                    WHOLE=rows % GROUP == 0 and cols % GROUP == 0,
                    num_warps=8,
                    maxnreg=_REGISTERS,
                    enable_fp_fusion=False,
                )
        return Quantized(codes, scale_inv)

    # One launch for each side: both in one would hold the tile in registers twice.
    return Operand(side(False) if rowwise else None, side(True) if columnwise else None)


def unpad(x: torch.Tensor, segments: Segments) -> torch.Tensor:
    """See :func:`fp8rl.numerics.unpad`."""
    cols = x.shape[1]
    out = x.new_empty(segments.tokens, cols)
    if out.numel():
        with torch.cuda.device_of(x):
            _unpad_kernel[(segments.rows // GROUP, cdiv(cols, _COPIED))](
                x, segments.table(x.device), out, cols, STEP=_COPIED, num_warps=8
            )
    return out

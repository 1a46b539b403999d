"""Triton kernels that quantize the operands of many experts in one launch.

Tiles are quantized as in :mod:`fp8rl.numerics.triton.dual` or, where the source can be packed, as
in :mod:`fp8rl.numerics.triton.packed`. Every expert starts a tile of its own; a table
(:meth:`fp8rl.numerics.ExpertRows.table`) tells each program which rows of the source it quantizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import FP8_DTYPE, GROUP, Operand, Quantized, cdiv
from fp8rl.numerics.grouped import Addresses, ExpertRows, GroupedColumns, GroupedRows, stream_of
from fp8rl.numerics.triton.dual import REGISTERS, quantize_dual_tile, side_pointers
from fp8rl.numerics.triton.multi_tensor import TRITON_DTYPES, all_aligned
from fp8rl.numerics.triton.packed import (
    PACKED_REGISTERS,
    can_pack,
    can_pack_tiles,
    quantize_packed_tile,
)
from fp8rl.numerics.triton.quantize import has_native_cast
from fp8rl.recipe import ScaleFormat

ALIGNMENT = GROUP
"""Rows of a tile that kernels multiply by the weight of one expert."""
_COPIED_COLUMNS = 1024  # of one program of the copy of boundary tiles


@triton.jit
def _load_rows(at, left, inside_cols, WHOLE: tl.constexpr):
    """Load 128 rows of which ``left`` exist; the others are zeros."""
    row = tl.arange(0, 128)
    if WHOLE:
        return tl.load(at, (row < left)[:, None], other=0.0)
    return tl.load(at, (row < left)[:, None] & inside_cols[None, :], other=0.0)


@triton.jit(do_not_specialize=["scale_stride", "scale_t_stride", "tile_cols"])
def _grouped_kernel(
    x_ptr,
    table_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
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
    PACKED: tl.constexpr,
):
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    entry = table_ptr + (tl.program_id(0) // tile_cols).to(tl.int64) * 6
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    left = tl.load(entry + 1)
    x_ptr += tl.load(entry).to(tl.int64) * stride_row + tile_col * 128 * stride_col
    at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col
    inside_cols = col < cols - tile_col * 128
    if ROWWISE:
        # The rows behind these are another expert's: they are not written.
        place = tl.load(entry + 2).to(tl.int64)
        if PACKED:
            codes_at = codes_ptr + place * cols + tile_col * 128
            packed_rowwise = (codes_at, scale_inv_ptr + tile_col * scale_stride + place, cols)
            quantize_packed_tile(
                x_ptr, stride_row, left, packed_rowwise, None, False, True, False, POW2, NATIVE
            )
        else:
            x = _load_rows(at, left, inside_cols, WHOLE)
            rowwise = (codes_ptr + place * cols, scale_inv_ptr + place, scale_stride, cols)
            quantize_dual_tile(
                x, 0, tile_col, (left, cols), rowwise, None, False, POW2, NATIVE, False
            )
    if COLUMNWISE:
        tiles = tl.load(entry + 4).to(tl.int64)
        if tiles > 0:
            # The codes of this expert are [cols, 128 * tiles], as if it were alone.
            first = tl.load(entry + 3).to(tl.int64)
            within = tl.load(entry + 5).to(tl.int64)
            codes_t_ptr += first * 128 * cols
            scale_inv_t_ptr += first * scale_t_stride
            if PACKED:
                codes_at = codes_t_ptr + (tile_col * 128 * tiles + within) * 128
                scale_at = scale_inv_t_ptr + within * scale_t_stride + tile_col * 128
                side = (codes_at, scale_at, tiles * 128)
                quantize_packed_tile(
                    x_ptr, stride_row, left, None, side, False, True, True, POW2, NATIVE
                )
            else:
                x = _load_rows(at, left, inside_cols, WHOLE)
                shape = (tiles * 128, cols)
                columnwise = (codes_t_ptr, scale_inv_t_ptr, scale_t_stride, tiles * 128)
                quantize_dual_tile(
                    x, within, tile_col, shape, None, columnwise, False, POW2, NATIVE, WHOLE
                )


@triton.jit(do_not_specialize=["tile_rows", "tile_cols"])
def _weights_kernel(
    table_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    tile_rows,
    tile_cols,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Quantize one 128x128 block of one expert, which the second program axis numbers."""
    expert = tl.program_id(1).to(tl.int64)
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    x_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    x_ptr += (tile_row * cols + tile_col) * 128
    codes_ptr += expert * rows * cols
    codes_t_ptr += expert * rows * cols
    scale_inv_ptr += expert * tile_rows * tile_cols
    scale_inv_t_ptr += expert * tile_rows * tile_cols
    if PACKED:
        codes_at = codes_ptr + (tile_row * cols + tile_col) * 128
        scale_at = scale_inv_ptr + tile_row * tile_cols + tile_col
        codes_t_at = codes_t_ptr + (tile_col * rows + tile_row) * 128
        scale_t_at = scale_inv_t_ptr + tile_col * tile_rows + tile_row
        packed_rowwise = (codes_at, scale_at, cols) if ROWWISE else None
        packed_columnwise = (codes_t_at, scale_t_at, rows) if COLUMNWISE else None
        quantize_packed_tile(
            x_ptr, cols, 128, packed_rowwise, packed_columnwise, True, False, False, POW2, NATIVE
        )
    else:
        row = tl.arange(0, 128)
        col = tl.arange(0, 128)
        at = x_ptr + row[:, None] * cols + col[None, :]
        left = tl.minimum(rows - tile_row * 128, 128)
        x = _load_rows(at, left, col < cols - tile_col * 128, WHOLE)
        shape = (rows, cols)
        rowwise = (codes_ptr, scale_inv_ptr, tile_cols, cols) if ROWWISE else None
        columnwise = (codes_t_ptr, scale_inv_t_ptr, tile_rows, rows) if COLUMNWISE else None
        quantize_dual_tile(
            x, tile_row, tile_col, shape, rowwise, columnwise, True, POW2, NATIVE, WHOLE
        )


@triton.jit(do_not_specialize=["first"])
def _boundary_kernel(y_ptr, table_ptr, first, cols, STEP: tl.constexpr):
    """Copy the rows of one boundary tile to where the tile of another expert has its own result."""
    entry = table_ptr + (first + tl.program_id(0)).to(tl.int64) * 6
    source = tl.load(entry).to(tl.int64)
    left = tl.load(entry + 1)
    place = tl.load(entry + 2).to(tl.int64)
    col = tl.program_id(1) * STEP + tl.arange(0, STEP)
    for begin in range(0, left, 16):
        row = begin + tl.arange(0, 16)
        inside = (row < left)[:, None] & (col < cols)[None, :]
        offset = row[:, None].to(tl.int64) * cols + col[None, :]
        y = tl.load(y_ptr + place * cols + offset, inside)
        tl.store(y_ptr + source * cols + offset, y, inside)


def quantize_grouped(
    x: torch.Tensor,
    expert_rows: ExpertRows,
    scale_format: ScaleFormat,
    rowwise: bool,
    columnwise: bool,
) -> tuple[GroupedRows | None, GroupedColumns | None]:
    rows, cols = expert_rows.rows, x.shape[1]
    groups = cdiv(cols, GROUP)
    by_rows = by_columns = None
    if rowwise:
        scales = x.new_empty(groups, rows, dtype=torch.float32)
        by_rows = GroupedRows(
            torch.empty(rows, cols, dtype=FP8_DTYPE, device=x.device), scales.t(), expert_rows
        )
    if columnwise:
        end = expert_rows.column_starts[-1]
        by_columns = GroupedColumns(
            torch.empty(end * cols, dtype=FP8_DTYPE, device=x.device),
            x.new_empty(expert_rows.group_starts[-1], cols, dtype=torch.float32),
            expert_rows,
        )
    table = expert_rows.table(x.device)
    if len(table) and cols:
        sides = [None if side is None else Quantized(*side[:2]) for side in (by_rows, by_columns)]
        with torch.cuda.device_of(x):
            _grouped_kernel[(len(table) * groups,)](
                x,
                table,
                *side_pointers(sides[0], x),
                *side_pointers(sides[1], x),
                cols,
                *x.stride(),
                rows,
                cols,
                groups,
                ROWWISE=rowwise,
                COLUMNWISE=columnwise,
                WHOLE=cols % GROUP == 0,
                **_options(x, scale_format, can_pack(x)),
            )
    return by_rows, by_columns


def quantize_weights(
    weights: Sequence[torch.Tensor],
    scale_format: ScaleFormat,
    rowwise: bool,
    columnwise: bool,
    known: Addresses,
) -> Operand:
    weights = [w.contiguous() for w in weights]
    first, experts = weights[0], len(weights)
    addresses = [w.data_ptr() for w in weights]
    aligned = all_aligned(addresses)
    packed = can_pack_tiles(first) and aligned
    if rowwise and columnwise and not packed:
        # Only the packed kernel makes both sides in one launch: see dual.quantize_weight.
        (by_rows, _), (_, by_columns) = (
            quantize_weights(weights, scale_format, one, not one, known) for one in (True, False)
        )
        return Operand(by_rows, by_columns)
    rows, cols = first.shape
    blocks = cdiv(rows, GROUP), cdiv(cols, GROUP)

    def side(shape: tuple[int, int], grid: tuple[int, int]) -> Quantized:
        codes = torch.empty(experts, *shape, dtype=FP8_DTYPE, device=first.device)
        return Quantized(codes, first.new_empty(experts, *grid, dtype=torch.float32))

    made = side((rows, cols), blocks) if rowwise else None
    made_t = side((cols, rows), (blocks[1], blocks[0])) if columnwise else None
    if first.numel():
        with torch.cuda.device_of(first):
            _weights_kernel[(blocks[0] * blocks[1], experts)](
                known.on_device(addresses, first.device, stream_of(first.device)),
                *side_pointers(made, first),
                *side_pointers(made_t, first),
                rows,
                cols,
                *blocks,
                DTYPE=TRITON_DTYPES[first.dtype],
                ALIGNED=aligned,
                ROWWISE=rowwise,
                COLUMNWISE=columnwise,
                WHOLE=rows % GROUP == 0 and cols % GROUP == 0,
                **_options(first, scale_format, packed),
            )
    return Operand(made, made_t)


def _options(x: torch.Tensor, scale_format: ScaleFormat, packed: bool) -> dict[str, Any]:
    return {
        "POW2": scale_format == "pow2",
        "NATIVE": has_native_cast(x.device),
        "PACKED": packed,
        "num_warps": 8,
        "maxnreg": PACKED_REGISTERS if packed else REGISTERS,
        "enable_fp_fusion": False,
    }


def place_boundaries(y: torch.Tensor, expert_rows: ExpertRows) -> None:
    table, cols, tiles = expert_rows.table(y.device), y.shape[1], len(expert_rows.boundaries)
    with torch.cuda.device_of(y):
        _boundary_kernel[(tiles, cdiv(cols, _COPIED_COLUMNS))](
            y, table, len(table) - tiles, cols, STEP=_COPIED_COLUMNS, num_warps=8
        )

"""Triton kernel for the operands of a linear layer: one read, codes along both dimensions.

One program owns a 128x128 tile, which holds whole groups of either direction (and one whole block
of a weight), so the tile's amaxes come from registers. Scales are written in the order in which
GEMM kernels on Hopper read them: groups outermost, so that one load fetches the scales of
consecutive rows (cuBLASLt's VEC128 layout and DeepGEMM's TMA layout are both this one).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics._format import FP8_DTYPE, GROUP, Operand, Quantized, cdiv
from fp8rl.numerics.triton_kernels import _codes, _scales, _spread, has_native_cast
from fp8rl.numerics.triton_quads import QUADS_REGISTERS, fits_quads, quads_kernel
from fp8rl.recipe import ScaleFormat

_SCALE_ALIGNMENT = 4  # float32 values; TMA wants 16 bytes between groups
# Of a thread, so that several programs fit a multiprocessor: some load, some compute.
_REGISTERS = 80


@triton.jit
def _mask(row, col, rows, cols):
    return (row < rows)[:, None] & (col < cols)[None, :]


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    """``WHOLE``: no tile reaches over an end, so nobody asks for the mask."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask, other=0.0)


@triton.jit
def _store(at, value, mask, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at, value)
    else:
        tl.store(at, value, mask)


@triton.jit
def _write_tile(
    x,
    tile_row,
    tile_col,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    padded_rows,
    scale_stride,
    scale_t_stride,
    BLOCK: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Codes and scales of one 128x128 tile of a ``[rows, cols]`` source, zeros beyond its ends."""
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    left = rows - tile_row * 128
    left_cols = cols - tile_col * 128
    inside = _mask(row, col, left, left_cols)
    inside_t = _mask(col, row, left_cols, padded_rows - tile_row * 128)
    codes_at = codes_ptr + tile_row * 128 * cols + tile_col * 128
    codes_at += row[:, None] * cols + col[None, :]
    codes_t_at = codes_t_ptr + tile_col * 128 * padded_rows + tile_row * 128
    codes_t_at += col[:, None] * padded_rows + row[None, :]
    SHIFT: tl.constexpr = 16 if x.dtype == tl.bfloat16 else 0
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True)
        magnitude = bits & 0x7FFF
        # Not a conversion: Triton's interpreter gets subnormals wrong.
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BLOCK:
        amax = tl.max(tl.max(magnitude, 1), 0, keep_dims=True).to(tl.int32) << SHIFT
        scale, scale_inv = _scales(amax, POW2)
        code = _codes(x, scale[:, None], NATIVE)
        one = tl.arange(0, 1)
        if ROWWISE:
            _store(codes_at, code, inside, WHOLE)
            tl.store(scale_inv_ptr + tile_row * scale_stride + tile_col + one, scale_inv)
        if COLUMNWISE:
            _store(codes_t_at, tl.trans(code), inside_t, WHOLE)
            tl.store(scale_inv_t_ptr + tile_col * scale_t_stride + tile_row + one, scale_inv)
    else:
        if ROWWISE:
            amax = _spread(tl.max(magnitude, 1).to(tl.int32) << SHIFT)
            scale, scale_inv = _scales(amax, POW2)
            at = scale_inv_ptr + tile_col * scale_stride + tile_row * 128 + row
            _store(at, scale_inv, row < left, WHOLE)
            _store(codes_at, _codes(x, scale[:, None], NATIVE), inside, WHOLE)
        if COLUMNWISE:
            amax = _spread(tl.max(magnitude, 0).to(tl.int32) << SHIFT)
            scale, scale_inv = _scales(amax, POW2)
            at = scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128 + col
            _store(at, scale_inv, col < left_cols, WHOLE)
            _store(codes_t_at, tl.trans(_codes(x, scale[None, :], NATIVE)), inside_t, WHOLE)


# Tokens differ from step to step: what follows from them is no reason to compile again.
@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def _two_way_kernel(
    x_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    padded_rows,
    scale_stride,
    scale_t_stride,
    tile_cols,
    BLOCK: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    inside = _mask(row, col, rows - tile_row * 128, cols - tile_col * 128)
    x_ptr += tile_row * 128 * stride_row + tile_col * 128 * stride_col
    at = x_ptr + row[:, None] * stride_row + col[None, :] * stride_col
    x = _load(at, inside, WHOLE)
    if not (ROWWISE and COLUMNWISE):
        _write_tile(
            x,
            tile_row,
            tile_col,
            codes_ptr,
            scale_inv_ptr,
            codes_t_ptr,
            scale_inv_t_ptr,
            rows,
            cols,
            padded_rows,
            scale_stride,
            scale_t_stride,
            BLOCK,
            ROWWISE,
            COLUMNWISE,
            POW2,
            NATIVE,
            WHOLE,
        )
    else:
        _write_tile(
            x,
            tile_row,
            tile_col,
            codes_ptr,
            scale_inv_ptr,
            codes_t_ptr,
            scale_inv_t_ptr,
            rows,
            cols,
            padded_rows,
            scale_stride,
            scale_t_stride,
            BLOCK,
            True,
            False,
            POW2,
            NATIVE,
            WHOLE,
        )
        # Read again, now from the cache: kept, the tile would take too many registers.
        x = _load(at, inside, WHOLE)
        _write_tile(
            x,
            tile_row,
            tile_col,
            codes_ptr,
            scale_inv_ptr,
            codes_t_ptr,
            scale_inv_t_ptr,
            rows,
            cols,
            padded_rows,
            scale_stride,
            scale_t_stride,
            BLOCK,
            False,
            True,
            POW2,
            NATIVE,
            WHOLE,
        )


class _Room:
    """Memory for both sides of an operand, and what a kernel must know of it."""

    def __init__(
        self,
        x: torch.Tensor,
        scale_format: ScaleFormat,
        rowwise: bool,
        columnwise: bool,
        *,
        block: bool = False,
    ) -> None:
        rows, cols = x.shape
        self.padded_rows = rows if block else cdiv(rows, GROUP) * GROUP
        self._spare = x  # in place of a side that is not wanted
        self.rowwise = self.columnwise = None
        if rowwise:
            codes = torch.empty(rows, cols, dtype=FP8_DTYPE, device=x.device)
            self.rowwise = Quantized(codes, _scales_room(x, rows, cols, block))
        if columnwise:
            codes = torch.empty(cols, self.padded_rows, dtype=FP8_DTYPE, device=x.device)
            self.columnwise = Quantized(codes, _scales_room(x, cols, rows, block))
        self.outer = 0 if block else 1  # the dimension of the scales that kernels stride over
        self.options = {
            "ROWWISE": rowwise,
            "COLUMNWISE": columnwise,
            "POW2": scale_format == "pow2",
            "NATIVE": has_native_cast(x.device),
            "WHOLE": rows % 128 == 0 and cols % 128 == 0,
            "num_warps": 8,
            "maxnreg": _REGISTERS,
            "enable_fp_fusion": False,
        }

    @property
    def pointers(self) -> tuple[torch.Tensor, ...]:
        sides = (self.rowwise, self.columnwise)
        return tuple(
            tensor.view(torch.uint8) if tensor.dtype == FP8_DTYPE else tensor
            for side in sides
            for tensor in (side or (self._spare, self._spare))
        )

    @property
    def strides(self) -> tuple[int, int]:
        first, second = (
            0 if side is None else side.scale_inv.stride(self.outer)
            for side in (self.rowwise, self.columnwise)
        )
        return first, second

    def operand(self) -> Operand:
        return Operand(self.rowwise, self.columnwise)


def _scales_room(x: torch.Tensor, rows: int, cols: int, block: bool) -> torch.Tensor:
    """``[ceil(rows/128), ceil(cols/128)]`` of blocks; ``[rows, ceil(cols/128)]`` of groups, those
    outermost in memory."""
    if block:
        return x.new_empty(cdiv(rows, GROUP), cdiv(cols, GROUP), dtype=torch.float32)
    aligned = cdiv(rows, _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
    return x.new_empty(cdiv(cols, GROUP), aligned, dtype=torch.float32)[:, :rows].t()


def quantize_operand(
    x: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    """See :func:`fp8rl.numerics.quantize_operand`."""
    return _quantize(x, _Room(x, scale_format, rowwise, columnwise))


def quantize_weight(
    w: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    """See :func:`fp8rl.numerics.quantize_weight`."""
    if rowwise and columnwise and w.dtype == torch.float32:
        # Triton 3.6 miscompiles the transposed store of codes that are stored as they are too.
        first, _ = quantize_weight(w, scale_format, True, False)
        _, second = quantize_weight(w, scale_format, False, True)
        return Operand(first, second)
    return _quantize(w, _Room(w, scale_format, rowwise, columnwise, block=True))


def _quantize(x: torch.Tensor, room: _Room) -> Operand:
    rows, cols = x.shape
    tile_cols = cdiv(cols, 128)
    if x.numel() and fits_quads(x):
        options = {**room.options, "maxnreg": QUADS_REGISTERS}
        del options["WHOLE"]
        with torch.cuda.device_of(x):
            quads_kernel[(rows // 128 * tile_cols,)](
                x,
                *room.pointers,
                rows,
                cols,
                x.stride(0),
                *room.strides,
                tile_cols,
                BLOCK=room.outer == 0,
                **options,
            )
    elif x.numel():
        with torch.cuda.device_of(x):
            _two_way_kernel[(cdiv(rows, 128) * tile_cols,)](
                x,
                *room.pointers,
                rows,
                cols,
                *x.stride(),
                room.padded_rows,
                *room.strides,
                tile_cols,
                BLOCK=room.outer == 0,
                **room.options,
            )
    return room.operand()

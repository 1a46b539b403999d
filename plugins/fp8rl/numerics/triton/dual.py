"""Triton kernel for the operands of a linear layer: one read, codes along both dimensions.

A row of codes is filled with zeros up to whole groups of 128, which add nothing to a product along
it: products have whole groups on a GPU, whatever the width of the layer.

One program owns a 128x128 tile, which holds whole groups of either direction (and one whole block
of a weight), so that the tile's amaxes come from registers. Scales are written in the order in
which GEMM kernels on Hopper read them: groups outermost, so that one load fetches the scales of
consecutive rows (cuBLASLt's VEC128 layout and DeepGEMM's TMA layout are both this one).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import FP8_DTYPE, GROUP, Operand, Quantized, cdiv, whole_groups
from fp8rl.numerics.triton.packed import PACKED_REGISTERS, can_pack, packed_kernel
from fp8rl.numerics.triton.quantize import (
    encode,
    has_native_cast,
    one_per_thread,
    quantization_scales,
)
from fp8rl.recipe import ScaleFormat

_SCALE_ALIGNMENT = 4  # float32 values; TMA needs a multiple of 16 bytes between groups
REGISTERS = 80
"""Registers of a thread, so that several programs fit a multiprocessor."""


@triton.jit
def _mask(row, col, rows, cols):
    return (row < rows)[:, None] & (col < cols)[None, :]


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    """Load a tile; with ``WHOLE`` no tile reaches over an end and no mask is needed."""
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
def quantize_dual_tile(
    x,
    tile_row,
    tile_col,
    shape,
    rowwise,
    columnwise,
    BLOCK: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write codes and scales of one 128x128 tile of a source of this ``shape``.

    ``x`` is the tile, with zeros beyond the ends of the source. A side is None if it is not wanted,
    or a tuple: pointers to the codes and to the scales of the whole source, the stride of the
    scales, and the row stride of the codes, up to which zeros fill each row.
    """
    rows, cols = shape
    row = tl.arange(0, 128)
    col = tl.arange(0, 128)
    left = rows - tile_row * 128
    left_cols = cols - tile_col * 128
    if rowwise is not None:
        codes_ptr, scale_inv_ptr, scale_stride, padded_cols = rowwise
        inside = _mask(row, col, left, padded_cols - tile_col * 128)
        codes_at = codes_ptr + tile_row * 128 * padded_cols + tile_col * 128
        codes_at += row[:, None] * padded_cols + col[None, :]
    if columnwise is not None:
        codes_t_ptr, scale_inv_t_ptr, scale_t_stride, padded_rows = columnwise
        inside_t = _mask(col, row, left_cols, padded_rows - tile_row * 128)
        codes_t_at = codes_t_ptr + tile_col * 128 * padded_rows + tile_row * 128
        codes_t_at += col[:, None] * padded_rows + row[None, :]
    SHIFT: tl.constexpr = 16 if x.dtype == tl.bfloat16 else 0
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True)
        magnitude = bits & 0x7FFF
        # A shift, because the conversion of Triton's interpreter gets subnormals wrong.
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BLOCK:
        amax = tl.max(tl.max(magnitude, 1), 0, keep_dims=True).to(tl.int32) << SHIFT
        scale, scale_inv = quantization_scales(amax, POW2)
        code = encode(x, scale[:, None], NATIVE)
        one = tl.arange(0, 1)
        if rowwise is not None:
            _store(codes_at, code, inside, WHOLE)
            tl.store(scale_inv_ptr + tile_row * scale_stride + tile_col + one, scale_inv)
        if columnwise is not None:
            _store(codes_t_at, tl.trans(code), inside_t, WHOLE)
            tl.store(scale_inv_t_ptr + tile_col * scale_t_stride + tile_row + one, scale_inv)
    else:
        if rowwise is not None:
            amax = one_per_thread(tl.max(magnitude, 1).to(tl.int32) << SHIFT)
            scale, scale_inv = quantization_scales(amax, POW2)
            at = scale_inv_ptr + tile_col * scale_stride + tile_row * 128 + row
            _store(at, scale_inv, row < left, WHOLE)
            _store(codes_at, encode(x, scale[:, None], NATIVE), inside, WHOLE)
        if columnwise is not None:
            amax = one_per_thread(tl.max(magnitude, 0).to(tl.int32) << SHIFT)
            scale, scale_inv = quantization_scales(amax, POW2)
            at = scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128 + col
            _store(at, scale_inv, col < left_cols, WHOLE)
            _store(codes_t_at, tl.trans(encode(x, scale[None, :], NATIVE)), inside_t, WHOLE)


# The number of tokens differs from step to step: what follows from it must not compile anew.
@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def _dual_kernel(
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
    shape = (rows, cols)
    padded_cols = cols
    if not WHOLE:
        padded_cols = tl.cdiv(cols, 128) * 128
    rowwise = (codes_ptr, scale_inv_ptr, scale_stride, padded_cols)
    columnwise = (codes_t_ptr, scale_inv_t_ptr, scale_t_stride, padded_rows)
    # The second side reads again, from the cache: a tile that is kept takes too many registers.
    if ROWWISE:
        x = _load(at, inside, WHOLE)
        quantize_dual_tile(x, tile_row, tile_col, shape, rowwise, None, BLOCK, POW2, NATIVE, WHOLE)
    if COLUMNWISE:
        x = _load(at, inside, WHOLE)
        quantize_dual_tile(
            x, tile_row, tile_col, shape, None, columnwise, BLOCK, POW2, NATIVE, WHOLE
        )


class DualOutput:
    """Uninitialised sides of an operand ``[rows, cols]``, and what a kernel needs to fill them."""

    def __init__(
        self,
        x: torch.Tensor,
        shape: tuple[int, int],
        scale_format: ScaleFormat,
        rowwise: bool,
        columnwise: bool,
        *,
        block: bool = False,
    ) -> None:
        rows, cols = shape
        device = x.device
        self.padded_rows = whole_groups(rows)
        self.rowwise = self.columnwise = None
        stride = stride_t = 0
        if rowwise:
            codes = torch.empty(rows, whole_groups(cols), dtype=FP8_DTYPE, device=device)
            scale_inv, stride = _empty_scales(device, rows, cols, block)
            self.rowwise = Quantized(codes, scale_inv)
        if columnwise:
            codes = torch.empty(cols, self.padded_rows, dtype=FP8_DTYPE, device=device)
            scale_inv, stride_t = _empty_scales(device, cols, rows, block)
            self.columnwise = Quantized(codes, scale_inv)
        self.pointers = (*side_pointers(self.rowwise, x), *side_pointers(self.columnwise, x))
        """Codes and scales of both sides; ``x`` stands for a side that is not wanted."""
        self.strides = (stride, stride_t)
        """Strides of the outermost dimension of both sides' scales."""
        self.whole = rows % 128 == 0 and cols % 128 == 0
        self.constants = {
            "ROWWISE": rowwise,
            "COLUMNWISE": columnwise,
            "POW2": scale_format == "pow2",
            "NATIVE": has_native_cast(device),
        }
        """Constants that every kernel of an operand has."""

    def operand(self) -> Operand:
        return Operand(self.rowwise, self.columnwise)


def side_pointers(side: Quantized | None, spare: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a kernel; ``spare`` stands for a side that is not wanted."""
    return (spare, spare) if side is None else (side.codes.view(torch.uint8), side.scale_inv)


def _empty_scales(
    device: torch.device, rows: int, cols: int, block: bool
) -> tuple[torch.Tensor, int]:
    """Uninitialised scales, and the stride of their outermost dimension.

    Blocks have ``[ceil(rows/128), ceil(cols/128)]``; groups have ``[rows, ceil(cols/128)]`` with
    the groups outermost in memory.
    """
    across = cdiv(cols, GROUP)
    if block:
        down = cdiv(rows, GROUP)
        return torch.empty(down, across, dtype=torch.float32, device=device), across
    aligned = cdiv(rows, _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
    scale_inv = torch.empty(across, aligned, dtype=torch.float32, device=device).t()
    return scale_inv if rows == aligned else scale_inv[:rows], aligned


def quantize_operand(
    x: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    return _quantize(x, scale_format, rowwise, columnwise, block=False)


def quantize_weight(
    w: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    if rowwise and columnwise and w.dtype == torch.float32:
        # Triton 3.6 miscompiles the transposed store of codes that are stored as they are too.
        first, _ = quantize_weight(w, scale_format, True, False)
        _, second = quantize_weight(w, scale_format, False, True)
        return Operand(first, second)
    return _quantize(w, scale_format, rowwise, columnwise, block=True)


def _quantize(
    x: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool, *, block: bool
) -> Operand:
    rows, cols = x.shape
    output = DualOutput(x, (rows, cols), scale_format, rowwise, columnwise, block=block)
    if not (rows and cols):
        return output.operand()
    tile_cols = cdiv(cols, 128)
    programs = cdiv(rows, 128) * tile_cols
    with torch.cuda.device_of(x):
        if can_pack(x) and (output.whole or not block):
            packed_kernel[(programs,)](
                x,
                *output.pointers,
                output.padded_rows,
                cols,
                x.stride(0),
                *output.strides,
                tile_cols,
                rows,
                BLOCK=block,
                MASKED=not output.whole,
                **output.constants,
                num_warps=8,
                maxnreg=PACKED_REGISTERS,
                enable_fp_fusion=False,
            )
        else:
            _dual_kernel[(programs,)](
                x,
                *output.pointers,
                rows,
                cols,
                *x.stride(),
                output.padded_rows,
                *output.strides,
                tile_cols,
                BLOCK=block,
                WHOLE=output.whole,
                **output.constants,
                num_warps=8,
                maxnreg=REGISTERS,
                enable_fp_fusion=False,
            )
    return output.operand()

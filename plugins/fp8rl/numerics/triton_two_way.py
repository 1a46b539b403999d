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
from fp8rl.numerics.triton_kernels import _encode, _scales, has_native_cast
from fp8rl.recipe import ScaleFormat

_SCALE_ALIGNMENT = 4  # float32 values; TMA wants 16 bytes between groups


@triton.jit
def _codes(x, scale, NATIVE: tl.constexpr):
    """E4M3 bits of ``x * scale``, NaN where ``x`` is not finite."""
    scaled = x * scale
    scaled = tl.fma(scaled, 0.0, scaled)  # infinity times zero is NaN; others stay as they are
    if NATIVE:  # saturates, keeps the sign of zeros, drops that of NaNs
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = _encode(tl.minimum(magnitude.to(tl.float32, bitcast=True), 448.0), NATIVE)
    code |= ((bits >> 24) & 0x80).to(tl.uint8)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def _spread(amax):
    """One value a thread: a reduction leaves many copies, and each would be divided by."""
    return tl.gather(amax, tl.arange(0, 128), 0)


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


@triton.jit
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
    x = _load(x_ptr + row[:, None] * stride_row + col[None, :] * stride_col, inside, WHOLE)
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


def quantize_operand(
    x: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    """See :func:`fp8rl.numerics.quantize_operand`."""
    rows, cols = x.shape
    padded_rows = cdiv(rows, GROUP) * GROUP
    along = _group_scales(x, rows, cdiv(cols, GROUP)) if rowwise else None
    across = _group_scales(x, cols, cdiv(rows, GROUP)) if columnwise else None
    return _launch(x, scale_format, along, across, padded_rows, block=False)


def quantize_weight(
    w: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    """See :func:`fp8rl.numerics.quantize_weight`."""
    grid = (cdiv(w.shape[0], GROUP), cdiv(w.shape[1], GROUP))
    along = w.new_empty(grid, dtype=torch.float32) if rowwise else None
    across = w.new_empty(grid[::-1], dtype=torch.float32) if columnwise else None
    return _launch(w, scale_format, along, across, w.shape[0], block=True)


def _group_scales(x: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """Room for ``[rows, groups]``, groups outermost."""
    aligned = cdiv(rows, _SCALE_ALIGNMENT) * _SCALE_ALIGNMENT
    return x.new_empty(groups, aligned, dtype=torch.float32)[:, :rows].t()


def _launch(
    x: torch.Tensor,
    scale_format: ScaleFormat,
    scale_inv: torch.Tensor | None,
    scale_inv_t: torch.Tensor | None,
    padded_rows: int,
    *,
    block: bool,
) -> Operand:
    rows, cols = x.shape
    codes = codes_t = None
    if scale_inv is not None:
        codes = torch.empty(rows, cols, dtype=FP8_DTYPE, device=x.device)
    if scale_inv_t is not None:
        codes_t = torch.empty(cols, padded_rows, dtype=FP8_DTYPE, device=x.device)
    tile_cols = cdiv(cols, 128)
    outer = 0 if block else 1  # the dimension of the scales that the kernel strides over
    if x.numel():
        with torch.cuda.device_of(x):
            _two_way_kernel[(cdiv(rows, 128) * tile_cols,)](
                x,
                x if codes is None else codes.view(torch.uint8),
                x if scale_inv is None else scale_inv,
                x if codes_t is None else codes_t.view(torch.uint8),
                x if scale_inv_t is None else scale_inv_t,
                rows,
                cols,
                x.stride(0),
                x.stride(1),
                padded_rows,
                0 if scale_inv is None else scale_inv.stride(outer),
                0 if scale_inv_t is None else scale_inv_t.stride(outer),
                tile_cols,
                BLOCK=block,
                ROWWISE=codes is not None,
                COLUMNWISE=codes_t is not None,
                POW2=scale_format == "pow2",
                NATIVE=has_native_cast(x.device),
                WHOLE=rows % 128 == 0 and cols % 128 == 0,
                num_warps=8,
                maxnreg=128,  # so that two programs fit a multiprocessor: one loads, one computes
                enable_fp_fusion=False,
            )
    return Operand(
        None if codes is None or scale_inv is None else Quantized(codes, scale_inv),
        None if codes_t is None or scale_inv_t is None else Quantized(codes_t, scale_inv_t),
    )

"""Triton kernel of ``quantize_block`` and ``quantize_group``, and the functions all kernels share.

Codes and scales equal those of :mod:`fp8rl.numerics.reference` bit for bit. One program quantizes
one tile in one read and one write. Magnitudes are compared as integers (so that a NaN wins a
maximum, as in torch), the division is IEEE round-to-nearest, powers of two are built from exponent
bits, and signs, also a NaN's, are copied from the source.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.formats import FP8_DTYPE, Quantized, cdiv
from fp8rl.recipe import ScaleFormat

_GROUP_ROWS = 32


@triton.jit
def _power_of_two(exponent):
    """2**exponent as float32, exponent in [-127, 127]; -127 is subnormal."""
    bits = tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quantization_scales(amax_bits, POW2: tl.constexpr):
    """``(scale, scale_inv)`` from the float32 bits of amaxes; see the reference."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
    usable = (amax_bits < 0x7F800000) & (scale.to(tl.int32, bitcast=True) < 0x7F800000)
    if POW2:
        # amax = 1.m * 2**e and 448 = 1.75 * 2**8; a usable amax is never subnormal.
        exponent = (amax_bits >> 23) - 127 - 8
        exponent += ((amax_bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.where(usable, tl.minimum(tl.maximum(exponent, -127), 127), 0)
        return _power_of_two(-exponent), _power_of_two(exponent)
    scale = tl.where(usable, scale, 1.0)
    return scale, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale)


@triton.jit
def encode_magnitude(magnitude, NATIVE: tl.constexpr):
    """E4M3 bits of ``0 <= magnitude <= 448``, rounded to nearest even."""
    if NATIVE:
        return magnitude.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Adding 2**14, whose unit in the last place is 2**-9, rounds to E4M3's subnormal grid.
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0.015625, subnormal, normal).to(tl.uint8)


@triton.jit
def encode(x, scale, NATIVE: tl.constexpr):
    """E4M3 bits of ``x * scale``, NaN where ``x`` is not finite."""
    scaled = x * scale
    scaled = tl.fma(scaled, 0.0, scaled)  # infinity times zero is NaN; finite values stay
    if NATIVE:  # the conversion saturates, keeps the sign of zeros and drops that of NaNs
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    bits = scaled.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = encode_magnitude(tl.minimum(magnitude.to(tl.float32, bitcast=True), 448.0), NATIVE)
    code |= ((bits >> 24) & 0x80).to(tl.uint8)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)


@triton.jit
def quantize_groups(y, POW2: tl.constexpr):
    """``(codes, scale_inv)`` of float32 values, one group a row."""
    source = y.to(tl.int32, bitcast=True)
    bits = source & 0x7FFFFFFF
    scale, scale_inv = quantization_scales(tl.max(bits, 1), POW2)
    scaled = tl.minimum(bits.to(tl.float32, bitcast=True) * scale[:, None], 448.0)
    code = tl.where(bits > 0x7F800000, 0x7F, encode_magnitude(scaled, True)).to(tl.uint8)
    return code | ((source >> 24) & 0x80).to(tl.uint8), scale_inv


@triton.jit
def one_per_thread(amax):
    """Keep one value a thread: a reduction leaves copies, and each copy would be divided by."""
    return tl.gather(amax, tl.arange(0, 128), 0)


@triton.jit(do_not_specialize=["tile_cols"])
def quantize_tile(
    x_ptr,
    codes_ptr,
    scale_inv_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    tile_cols,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    PER_ROW: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize one tile, which the first program axis numbers.

    ``PER_ROW`` makes a scale for each row of the tile, otherwise the tile has one scale.
    """
    tile_row = tl.program_id(0) // tile_cols
    tile_col = tl.program_id(0) % tile_cols
    row = tile_row.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    col = tile_col.to(tl.int64) * TILE_COLS + tl.arange(0, TILE_COLS)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * stride_row + col[None, :] * stride_col, inside, other=0.0)
    if x.dtype == tl.float32:
        source = x.to(tl.int32, bitcast=True)
        bits = source & 0x7FFFFFFF
    else:
        source = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        if x.dtype == tl.bfloat16:
            bits = source & 0x7FFFFFFF
        else:
            bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    sign = (source >> 24) & 0x80
    amax_bits = tl.max(bits, 1)
    scale_row = row
    if not PER_ROW:
        amax_bits = tl.max(amax_bits, 0, keep_dims=True)
        scale_row = tile_row.to(tl.int64) + tl.arange(0, 1)
    scale, scale_inv = quantization_scales(amax_bits, POW2)
    tl.store(scale_inv_ptr + scale_row * tile_cols + tile_col, scale_inv, scale_row < rows)
    scaled = tl.minimum(bits.to(tl.float32, bitcast=True) * scale[:, None], 448.0)
    code = tl.where(bits > 0x7F800000, 0x7F, encode_magnitude(scaled, NATIVE)).to(tl.uint8)
    code |= sign.to(tl.uint8)
    tl.store(codes_ptr + row[:, None] * cols + col[None, :], code, inside)


@cache
def has_native_cast(device: torch.device) -> bool:
    """Whether the GPU converts to E4M3 in hardware (Ada, Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def has_packed_maximum(device: torch.device) -> bool:
    """Whether the device compares two 16-bit numbers at a time: Hopper and later, and a CPU, where
    Triton's interpreter runs."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def quantize_block(w: torch.Tensor, block: tuple[int, int], scale_format: ScaleFormat) -> Quantized:
    scale_inv = w.new_empty(
        cdiv(w.shape[0], block[0]), cdiv(w.shape[1], block[1]), dtype=torch.float32
    )
    codes = torch.empty(w.shape, dtype=FP8_DTYPE, device=w.device)
    _launch(w, codes, scale_inv, block, per_row=False, pow2=scale_format == "pow2")
    return Quantized(codes, scale_inv)


def quantize_group(x: torch.Tensor, group: int, scale_format: ScaleFormat) -> Quantized:
    k = x.shape[-1]
    scale_inv = x.new_empty(*x.shape[:-1], cdiv(k, group), dtype=torch.float32)
    codes = torch.empty(x.shape, dtype=FP8_DTYPE, device=x.device)
    flat = x.reshape(-1, k) if x.numel() else x.new_empty(0, k)
    tile = (_GROUP_ROWS, group)
    _launch(flat, codes, scale_inv, tile, per_row=True, pow2=scale_format == "pow2")
    return Quantized(codes, scale_inv)


def _launch(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    tile: tuple[int, int],
    *,
    per_row: bool,
    pow2: bool,
) -> None:
    for side in tile:
        if side <= 0 or side & (side - 1):
            raise UnsupportedError(
                f"The Triton kernels need block sides that are powers of two, not {side}."
            )
    if not x.numel():
        return
    rows, cols = x.shape
    tile_cols = cdiv(cols, tile[1])
    with torch.cuda.device_of(x):
        quantize_tile[(cdiv(rows, tile[0]) * tile_cols,)](
            x,
            codes.view(torch.uint8),
            scale_inv,
            rows,
            cols,
            *x.stride()[:2],
            tile_cols,
            TILE_ROWS=tile[0],
            TILE_COLS=tile[1],
            PER_ROW=per_row,
            POW2=pow2,
            NATIVE=has_native_cast(x.device),
            num_warps=4 if per_row else 8,
            enable_fp_fusion=False,
        )

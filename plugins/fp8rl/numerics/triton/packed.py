"""Triton kernel for bfloat16 operands whose columns fill 128x128 tiles: half the instructions of
the general kernel of :mod:`fp8rl.numerics.triton.dual`, which those instructions bound.

A tile is loaded as 64-bit words, four values each, and as four tensors: of the rows 4i, 4i+1, 4i+2
and 4i+3. So a thread holds squares of 4x4 values. Magnitudes are compared two at a time, four codes
are one 32-bit word, a square of codes is transposed by permuting bytes in registers, and what goes
through shared memory to be stored along the other dimension are those words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.triton.quantize import _codes, _scales, _spread

QUADS_REGISTERS = 64  # of a thread: four programs fit a multiprocessor


def has_quads(x: torch.Tensor) -> bool:
    """Whether rows of ``x`` can be read as aligned 64-bit words, on Hopper or later."""
    return (
        (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))  # max.u16x2
        and x.dtype == torch.bfloat16
        and x.shape[1] % 128 == 0
        and x.stride(1) == 1
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
    )


def fits_quads(x: torch.Tensor) -> bool:
    """:func:`has_quads` of a tensor that is made of whole tiles."""
    return has_quads(x) and x.shape[0] % 128 == 0


@triton.jit
def _larger_native(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _larger_plain(a, b):
    high = tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    return high | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def _larger(a, b, NATIVE: tl.constexpr):
    """Larger of each of two bfloat16 magnitudes in a word."""
    if NATIVE:
        return _larger_native(a, b)
    return _larger_plain(a, b)


@triton.jit
def _largest(pairs, DIM: tl.constexpr, KEEP: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.reduce(pairs, DIM, _larger_native, keep_dims=KEEP)
    return tl.reduce(pairs, DIM, _larger_plain, keep_dims=KEEP)


@triton.jit
def _low(quad):
    return quad.to(tl.int32)


@triton.jit
def _high(quad):
    return (quad >> 32).to(tl.int32)


@triton.jit
def _of_row(quad, NATIVE: tl.constexpr):
    """Larger magnitudes of the two pairs of a quad."""
    return _larger(_low(quad) & 0x7FFF7FFF, _high(quad) & 0x7FFF7FFF, NATIVE)


@triton.jit
def _of_four(a, b, c, d, NATIVE: tl.constexpr):
    return _larger(_larger(a, b, NATIVE), _larger(c, d, NATIVE), NATIVE)


@triton.jit
def _of_columns(a, b, c, d, NATIVE: tl.constexpr):
    """Largest magnitudes of each column of a tile whose rows have these pairs."""
    a, b, c, d = a & 0x7FFF7FFF, b & 0x7FFF7FFF, c & 0x7FFF7FFF, d & 0x7FFF7FFF
    return _largest(_of_four(a, b, c, d, NATIVE), 0, False, NATIVE)


@triton.jit
def _one_of(pairs):
    """Float32 bits of the larger of two magnitudes."""
    return tl.maximum(pairs << 16, pairs & 0x7FFF0000)


@triton.jit
def _scaled(bits, scale):
    """Float32, NaN where ``bits`` are not finite."""
    scaled = bits.to(tl.float32, bitcast=True) * scale
    return tl.fma(scaled, 0.0, scaled)


@triton.jit
def _encode_quad(quad, s0, s1, s2, s3, NATIVE: tl.constexpr):
    """Four codes in a word, the first in its lowest byte."""
    low, high = _low(quad), _high(quad)
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r",
            [
                _scaled(low << 16, s0),
                _scaled(low & -65536, s1),
                _scaled(high << 16, s2),
                _scaled(high & -65536, s3),
            ],
            tl.int32,
            True,
            1,
        )
    first = _codes((low << 16).to(tl.float32, bitcast=True), s0, NATIVE).to(tl.int32)
    second = _codes((low & -65536).to(tl.float32, bitcast=True), s1, NATIVE).to(tl.int32)
    third = _codes((high << 16).to(tl.float32, bitcast=True), s2, NATIVE).to(tl.int32)
    fourth = _codes((high & -65536).to(tl.float32, bitcast=True), s3, NATIVE).to(tl.int32)
    return first | (second << 8) | (third << 16) | (fourth << 24)


@triton.jit
def _low_bytes(a, b, NATIVE: tl.constexpr):
    """Bytes a0 b0 a1 b1."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return (a & 0xFF) | ((b & 0xFF) << 8) | ((a & 0xFF00) << 8) | ((b & 0xFF00) << 16)


@triton.jit
def _high_bytes(a, b, NATIVE: tl.constexpr):
    """Bytes a2 b2 a3 b3."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return _low_bytes((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF, NATIVE)


@triton.jit
def _low_halves(a, b, NATIVE: tl.constexpr):
    """Bytes a0 a1 b0 b1."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _high_halves(a, b, NATIVE: tl.constexpr):
    """Bytes a2 a3 b2 b3."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return ((a >> 16) & 0xFFFF) | (b & -65536)


@triton.jit
def _store_quads(at, codes, line, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, codes, (line < left)[:, None])
    else:
        tl.store(at, codes)


@triton.jit
def _store_rows(at, stride, left, c0, c1, c2, c3, MASKED: tl.constexpr):
    line = tl.arange(0, 32) * 4
    _store_quads(at, c0, line, left, MASKED)
    _store_quads(at + stride, c1, line + 1, left, MASKED)
    _store_quads(at + 2 * stride, c2, line + 2, left, MASKED)
    _store_quads(at + 3 * stride, c3, line + 3, left, MASKED)


@triton.jit
def _store_columns(at, stride, c0, c1, c2, c3, NATIVE: tl.constexpr):
    a = _low_bytes(c0, c1, NATIVE)
    b = _low_bytes(c2, c3, NATIVE)
    tl.store(at, tl.trans(_low_halves(a, b, NATIVE)))
    tl.store(at + stride, tl.trans(_high_halves(a, b, NATIVE)))
    a = _high_bytes(c0, c1, NATIVE)
    b = _high_bytes(c2, c3, NATIVE)
    tl.store(at + 2 * stride, tl.trans(_low_halves(a, b, NATIVE)))
    tl.store(at + 3 * stride, tl.trans(_high_halves(a, b, NATIVE)))


@triton.jit
def _interleave(a, b, c, d):
    """Four times ``[32]`` to ``[128]``, one a thread."""
    return _spread(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (128,)))


@triton.jit
def _every_fourth(x, FIRST: tl.constexpr):
    # Not a reshape, which would have each thread divide for all that it gets.
    return tl.gather(x, tl.arange(0, 32) * 4 + FIRST, 0)


@triton.jit
def quads_at(x_ptr, step):
    """Words of the rows 0, 4, 8.. of a tile, whose rows are ``step`` words apart."""
    word = tl.arange(0, 32)
    return x_ptr.to(tl.pointer_type(tl.int64)) + (word * 4)[:, None] * step + word[None, :]


@triton.jit
def load_quads(at, first, left, MASKED: tl.constexpr):
    """Words of every fourth row of a tile from row ``first`` on; zeros from row ``left`` on."""
    if MASKED:
        return tl.load(at, (tl.arange(0, 32) * 4 + first < left)[:, None], other=0)
    return tl.load(at)


@triton.jit
def _words_at(codes_ptr, stride):
    """Words of codes of the rows 0, 4, 8.. of a tile."""
    word = tl.arange(0, 32)
    return codes_ptr.to(tl.pointer_type(tl.int32)) + (word * 4)[:, None] * stride + word[None, :]


@triton.jit
def quads_groups(
    x0,
    x1,
    x2,
    x3,
    left,
    codes_ptr,
    scale_inv_ptr,
    cols,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    MASKED: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and scales in groups of a tile whose every fourth rows are ``x0`` to ``x3``.

    Pointers, ``cols`` and ``rows`` are as in :func:`quads_tile`. With ``MASKED`` the side in order
    is written up to row ``left``, the transposed one whole.
    """
    # Here rather than where they are used: there ptxas spilled more.
    width = cols // 4
    codes_at = _words_at(codes_ptr, width)
    height = rows // 4
    codes_t_at = _words_at(codes_t_ptr, height)
    line = tl.arange(0, 128)
    if ROWWISE:
        amax = _interleave(
            _one_of(_largest(_of_row(x0, NATIVE), 1, False, NATIVE)),
            _one_of(_largest(_of_row(x1, NATIVE), 1, False, NATIVE)),
            _one_of(_largest(_of_row(x2, NATIVE), 1, False, NATIVE)),
            _one_of(_largest(_of_row(x3, NATIVE), 1, False, NATIVE)),
        )
        scale, scale_inv = _scales(amax, POW2)
        if MASKED:
            tl.store(scale_inv_ptr + line, scale_inv, line < left)
        else:
            tl.store(scale_inv_ptr + line, scale_inv)
        s0 = _every_fourth(scale, 0)[:, None]
        s1 = _every_fourth(scale, 1)[:, None]
        s2 = _every_fourth(scale, 2)[:, None]
        s3 = _every_fourth(scale, 3)[:, None]
        c0 = _encode_quad(x0, s0, s0, s0, s0, NATIVE)
        c1 = _encode_quad(x1, s1, s1, s1, s1, NATIVE)
        c2 = _encode_quad(x2, s2, s2, s2, s2, NATIVE)
        c3 = _encode_quad(x3, s3, s3, s3, s3, NATIVE)
        _store_rows(codes_at, width, left, c0, c1, c2, c3, MASKED)
    if COLUMNWISE:
        low = _of_columns(_low(x0), _low(x1), _low(x2), _low(x3), NATIVE)
        high = _of_columns(_high(x0), _high(x1), _high(x2), _high(x3), NATIVE)
        amax = _interleave(low << 16, low & 0x7FFF0000, high << 16, high & 0x7FFF0000)
        scale, scale_inv = _scales(amax, POW2)
        tl.store(scale_inv_t_ptr + line, scale_inv)
        s0 = _every_fourth(scale, 0)[None, :]
        s1 = _every_fourth(scale, 1)[None, :]
        s2 = _every_fourth(scale, 2)[None, :]
        s3 = _every_fourth(scale, 3)[None, :]
        c0 = _encode_quad(x0, s0, s1, s2, s3, NATIVE)
        c1 = _encode_quad(x1, s0, s1, s2, s3, NATIVE)
        c2 = _encode_quad(x2, s0, s1, s2, s3, NATIVE)
        c3 = _encode_quad(x3, s0, s1, s2, s3, NATIVE)
        _store_columns(codes_t_at, height, c0, c1, c2, c3, NATIVE)


@triton.jit
def quads_tile(
    x_ptr,
    stride_row,
    left,
    codes_ptr,
    scale_inv_ptr,
    cols,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    BLOCK: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One 128x128 tile of a bfloat16 source; see :func:`has_quads`.

    Every pointer is that of the tile's first element, ``cols`` and ``rows`` are what rows of codes
    and of transposed codes are apart. With ``MASKED`` the tile has ``left`` rows and others are
    zeros, which only with ``PADDED`` are written to the side in order too; blocks are whole.
    """
    step = stride_row // 4
    at = quads_at(x_ptr, step)
    x0 = load_quads(at, 0, left, MASKED)
    x1 = load_quads(at + step, 1, left, MASKED)
    x2 = load_quads(at + 2 * step, 2, left, MASKED)
    x3 = load_quads(at + 3 * step, 3, left, MASKED)
    if BLOCK:
        width = cols // 4
        codes_at = _words_at(codes_ptr, width)
        height = rows // 4
        codes_t_at = _words_at(codes_t_ptr, height)
        pairs = _of_four(
            _of_row(x0, NATIVE),
            _of_row(x1, NATIVE),
            _of_row(x2, NATIVE),
            _of_row(x3, NATIVE),
            NATIVE,
        )
        amax = _one_of(_largest(_largest(pairs, 1, False, NATIVE), 0, True, NATIVE))
        scale, scale_inv = _scales(amax, POW2)
        s = scale[:, None]
        c0 = _encode_quad(x0, s, s, s, s, NATIVE)
        c1 = _encode_quad(x1, s, s, s, s, NATIVE)
        c2 = _encode_quad(x2, s, s, s, s, NATIVE)
        c3 = _encode_quad(x3, s, s, s, s, NATIVE)
        one = tl.arange(0, 1)
        if ROWWISE:
            _store_rows(codes_at, width, 128, c0, c1, c2, c3, False)
            tl.store(scale_inv_ptr + one, scale_inv)
        if COLUMNWISE:
            _store_columns(codes_t_at, height, c0, c1, c2, c3, NATIVE)
            tl.store(scale_inv_t_ptr + one, scale_inv)
    else:
        quads_groups(
            x0,
            x1,
            x2,
            x3,
            left,
            codes_ptr,
            scale_inv_ptr,
            cols,
            codes_t_ptr,
            scale_inv_t_ptr,
            rows,
            ROWWISE,
            COLUMNWISE,
            MASKED and not PADDED,
            POW2,
            NATIVE,
        )


# Tokens differ from step to step: what follows from them is no reason to compile again.
@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def quads_kernel(
    x_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    padded_rows,
    cols,
    stride_row,
    scale_stride,
    scale_t_stride,
    tile_cols,
    rows,
    BLOCK: tl.constexpr,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A bfloat16 ``[rows, cols]`` source, one tile a program; see :func:`has_quads`.

    Its ``rows`` matter with ``MASKED`` alone: otherwise they are the ``padded_rows``, multiples of
    128, that transposed codes have. Blocks are whole.
    """
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    left = tl.minimum(rows - tile_row * 128, 128).to(tl.int32)
    x_ptr += tile_row * 128 * stride_row + tile_col * 128
    codes_ptr += tile_row * 128 * cols + tile_col * 128
    codes_t_ptr += tile_col * 128 * padded_rows + tile_row * 128
    if BLOCK:
        quads_tile(
            x_ptr,
            stride_row,
            128,
            codes_ptr,
            scale_inv_ptr + tile_row * scale_stride + tile_col,
            cols,
            codes_t_ptr,
            scale_inv_t_ptr + tile_col * scale_t_stride + tile_row,
            padded_rows,
            True,
            ROWWISE,
            COLUMNWISE,
            False,
            False,
            POW2,
            NATIVE,
        )
    else:
        # One side after the other, the second from the cache: kept, the tile would take too many
        # registers.
        if ROWWISE:
            quads_tile(
                x_ptr,
                stride_row,
                left,
                codes_ptr,
                scale_inv_ptr + tile_col * scale_stride + tile_row * 128,
                cols,
                codes_t_ptr,
                scale_inv_t_ptr,
                padded_rows,
                False,
                True,
                False,
                MASKED,
                False,
                POW2,
                NATIVE,
            )
        if COLUMNWISE:
            quads_tile(
                x_ptr,
                stride_row,
                left,
                codes_ptr,
                scale_inv_ptr,
                cols,
                codes_t_ptr,
                scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128,
                padded_rows,
                False,
                False,
                True,
                MASKED,
                False,
                POW2,
                NATIVE,
            )

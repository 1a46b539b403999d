"""Triton kernel for bfloat16 operands that quantizes four packed values at a time.

It serves tensors whose columns fill 128x128 tiles, on Hopper or later, and takes half the
instructions of the general kernel of :mod:`fp8rl.numerics.triton.dual`, which is bound by them.

A tile is loaded as 64-bit words of four values each, and as four tensors: the rows 4i, 4i+1, 4i+2
and 4i+3. A thread therefore holds squares of 4x4 values. Magnitudes are compared two at a time;
four codes are one 32-bit word; a square of codes is transposed by permuting bytes in registers, so
that the transposed codes go through shared memory as words too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.triton.quantize import encode, one_per_thread, quantization_scales

PACKED_REGISTERS = 64  # registers of a thread: four programs fit a multiprocessor


def can_pack(x: torch.Tensor) -> bool:
    """Whether rows of ``x`` can be read as aligned 64-bit words, on Hopper or later."""
    return (
        (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (9, 0))  # max.u16x2
        and x.dtype == torch.bfloat16
        and x.shape[1] % 128 == 0
        and x.stride(1) == 1
        and x.stride(0) % 4 == 0
        and x.data_ptr() % 8 == 0
    )


def can_pack_tiles(x: torch.Tensor) -> bool:
    """Whether :func:`can_pack` holds and the tensor consists of whole 128x128 tiles."""
    return can_pack(x) and x.shape[0] % 128 == 0


@triton.jit
def _max_pair_native(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _max_pair_plain(a, b):
    high = tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000)
    return high | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def _max_pair(a, b, NATIVE: tl.constexpr):
    """The larger of each of the two bfloat16 magnitudes in the words ``a`` and ``b``."""
    if NATIVE:
        return _max_pair_native(a, b)
    return _max_pair_plain(a, b)


@triton.jit
def _reduce_max(pairs, DIM: tl.constexpr, KEEP: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.reduce(pairs, DIM, _max_pair_native, keep_dims=KEEP)
    return tl.reduce(pairs, DIM, _max_pair_plain, keep_dims=KEEP)


@triton.jit
def low_pair(packed):
    return packed.to(tl.int32)


@triton.jit
def high_pair(packed):
    return (packed >> 32).to(tl.int32)


@triton.jit
def _max_in_word(packed, NATIVE: tl.constexpr):
    """Two magnitudes in a word: the larger of values 0 and 2, and of values 1 and 3."""
    return _max_pair(low_pair(packed) & 0x7FFF7FFF, high_pair(packed) & 0x7FFF7FFF, NATIVE)


@triton.jit
def _max_of_four(a, b, c, d, NATIVE: tl.constexpr):
    return _max_pair(_max_pair(a, b, NATIVE), _max_pair(c, d, NATIVE), NATIVE)


@triton.jit
def _column_max(a, b, c, d, NATIVE: tl.constexpr):
    """The largest magnitudes of two columns of a tile, from the pairs of the four row sets."""
    a, b, c, d = a & 0x7FFF7FFF, b & 0x7FFF7FFF, c & 0x7FFF7FFF, d & 0x7FFF7FFF
    return _reduce_max(_max_of_four(a, b, c, d, NATIVE), 0, False, NATIVE)


@triton.jit
def _amax_bits(pairs):
    """Float32 bits of the larger of the two magnitudes in a word."""
    return tl.maximum(pairs << 16, pairs & 0x7FFF0000)


@triton.jit
def _scaled(bits, scale):
    """Scaled float32 values; NaN where ``bits`` are not finite."""
    scaled = bits.to(tl.float32, bitcast=True) * scale
    return tl.fma(scaled, 0.0, scaled)


@triton.jit
def _encode_packed(packed, s0, s1, s2, s3, NATIVE: tl.constexpr):
    """Four codes in a 32-bit word, the first in the lowest byte."""
    low, high = low_pair(packed), high_pair(packed)
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
    first = encode((low << 16).to(tl.float32, bitcast=True), s0, NATIVE).to(tl.int32)
    second = encode((low & -65536).to(tl.float32, bitcast=True), s1, NATIVE).to(tl.int32)
    third = encode((high << 16).to(tl.float32, bitcast=True), s2, NATIVE).to(tl.int32)
    fourth = encode((high & -65536).to(tl.float32, bitcast=True), s3, NATIVE).to(tl.int32)
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
def _store_words(at, codes, line, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, codes, (line < left)[:, None])
    else:
        tl.store(at, codes)


@triton.jit
def _store_rows(at, stride, left, c0, c1, c2, c3, MASKED: tl.constexpr):
    line = tl.arange(0, 32) * 4
    _store_words(at, c0, line, left, MASKED)
    _store_words(at + stride, c1, line + 1, left, MASKED)
    _store_words(at + 2 * stride, c2, line + 2, left, MASKED)
    _store_words(at + 3 * stride, c3, line + 3, left, MASKED)


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
    """Interleave four ``[32]`` tensors to ``[128]``, one value a thread."""
    return one_per_thread(tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (128,)))


@triton.jit
def _every_fourth(x, FIRST: tl.constexpr):
    # A reshape would leave copies in each thread, and each copy would be divided by.
    return tl.gather(x, tl.arange(0, 32) * 4 + FIRST, 0)


@triton.jit
def packed_pointers(x_ptr, step):
    """Pointers to the 64-bit words of the rows 0, 4, 8.. of a tile with ``step`` words a row."""
    word = tl.arange(0, 32)
    return x_ptr.to(tl.pointer_type(tl.int64)) + (word * 4)[:, None] * step + word[None, :]


@triton.jit
def load_packed(at, first, left, MASKED: tl.constexpr):
    """Load every fourth row of a tile from row ``first`` on; rows from ``left`` on are zeros."""
    if MASKED:
        return tl.load(at, (tl.arange(0, 32) * 4 + first < left)[:, None], other=0)
    return tl.load(at)


@triton.jit
def _words_at(codes_ptr, stride):
    """Pointers to the words of codes of the rows 0, 4, 8.. of a tile."""
    word = tl.arange(0, 32)
    return codes_ptr.to(tl.pointer_type(tl.int32)) + (word * 4)[:, None] * stride + word[None, :]


@triton.jit
def quantize_packed_groups(
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
    """Write codes and scales in 1x128 groups of a tile, given as ``x0`` to ``x3``.

    ``x0`` has the rows 0, 4, 8.., ``x1`` the rows 1, 5, 9.., and so on. Pointers, ``cols`` and
    ``rows`` are as in :func:`quantize_packed_tile`. With ``MASKED`` the rowwise side is written up
    to row ``left``, and the columnwise side whole.
    """
    # Computed here rather than where they are used: ptxas spilled more registers there.
    width = cols // 4
    codes_at = _words_at(codes_ptr, width)
    height = rows // 4
    codes_t_at = _words_at(codes_t_ptr, height)
    line = tl.arange(0, 128)
    if ROWWISE:
        amax = _interleave(
            _amax_bits(_reduce_max(_max_in_word(x0, NATIVE), 1, False, NATIVE)),
            _amax_bits(_reduce_max(_max_in_word(x1, NATIVE), 1, False, NATIVE)),
            _amax_bits(_reduce_max(_max_in_word(x2, NATIVE), 1, False, NATIVE)),
            _amax_bits(_reduce_max(_max_in_word(x3, NATIVE), 1, False, NATIVE)),
        )
        scale, scale_inv = quantization_scales(amax, POW2)
        if MASKED:
            tl.store(scale_inv_ptr + line, scale_inv, line < left)
        else:
            tl.store(scale_inv_ptr + line, scale_inv)
        s0 = _every_fourth(scale, 0)[:, None]
        s1 = _every_fourth(scale, 1)[:, None]
        s2 = _every_fourth(scale, 2)[:, None]
        s3 = _every_fourth(scale, 3)[:, None]
        c0 = _encode_packed(x0, s0, s0, s0, s0, NATIVE)
        c1 = _encode_packed(x1, s1, s1, s1, s1, NATIVE)
        c2 = _encode_packed(x2, s2, s2, s2, s2, NATIVE)
        c3 = _encode_packed(x3, s3, s3, s3, s3, NATIVE)
        _store_rows(codes_at, width, left, c0, c1, c2, c3, MASKED)
    if COLUMNWISE:
        low = _column_max(low_pair(x0), low_pair(x1), low_pair(x2), low_pair(x3), NATIVE)
        high = _column_max(high_pair(x0), high_pair(x1), high_pair(x2), high_pair(x3), NATIVE)
        amax = _interleave(low << 16, low & 0x7FFF0000, high << 16, high & 0x7FFF0000)
        scale, scale_inv = quantization_scales(amax, POW2)
        tl.store(scale_inv_t_ptr + line, scale_inv)
        s0 = _every_fourth(scale, 0)[None, :]
        s1 = _every_fourth(scale, 1)[None, :]
        s2 = _every_fourth(scale, 2)[None, :]
        s3 = _every_fourth(scale, 3)[None, :]
        c0 = _encode_packed(x0, s0, s1, s2, s3, NATIVE)
        c1 = _encode_packed(x1, s0, s1, s2, s3, NATIVE)
        c2 = _encode_packed(x2, s0, s1, s2, s3, NATIVE)
        c3 = _encode_packed(x3, s0, s1, s2, s3, NATIVE)
        _store_columns(codes_t_at, height, c0, c1, c2, c3, NATIVE)


@triton.jit
def quantize_packed_tile(
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
    """Quantize one 128x128 tile of a bfloat16 source; see :func:`can_pack`.

    Every pointer points to the tile's first element; ``cols`` and ``rows`` are the row strides of
    the codes and of the transposed codes. With ``MASKED`` the tile has ``left`` rows and the other
    rows are zeros, which are written to the rowwise side only with ``PADDED``. With ``BLOCK`` the
    tile has one scale and must be whole.
    """
    step = stride_row // 4
    at = packed_pointers(x_ptr, step)
    x0 = load_packed(at, 0, left, MASKED)
    x1 = load_packed(at + step, 1, left, MASKED)
    x2 = load_packed(at + 2 * step, 2, left, MASKED)
    x3 = load_packed(at + 3 * step, 3, left, MASKED)
    if BLOCK:
        width = cols // 4
        codes_at = _words_at(codes_ptr, width)
        height = rows // 4
        codes_t_at = _words_at(codes_t_ptr, height)
        pairs = _max_of_four(
            _max_in_word(x0, NATIVE),
            _max_in_word(x1, NATIVE),
            _max_in_word(x2, NATIVE),
            _max_in_word(x3, NATIVE),
            NATIVE,
        )
        amax = _amax_bits(_reduce_max(_reduce_max(pairs, 1, False, NATIVE), 0, True, NATIVE))
        scale, scale_inv = quantization_scales(amax, POW2)
        s = scale[:, None]
        c0 = _encode_packed(x0, s, s, s, s, NATIVE)
        c1 = _encode_packed(x1, s, s, s, s, NATIVE)
        c2 = _encode_packed(x2, s, s, s, s, NATIVE)
        c3 = _encode_packed(x3, s, s, s, s, NATIVE)
        one = tl.arange(0, 1)
        if ROWWISE:
            _store_rows(codes_at, width, 128, c0, c1, c2, c3, False)
            tl.store(scale_inv_ptr + one, scale_inv)
        if COLUMNWISE:
            _store_columns(codes_t_at, height, c0, c1, c2, c3, NATIVE)
            tl.store(scale_inv_t_ptr + one, scale_inv)
    else:
        quantize_packed_groups(
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


# The number of tokens differs from step to step: what follows from it must not compile anew.
@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def packed_kernel(
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
    """Quantize a bfloat16 ``[rows, cols]`` source, one tile a program; see :func:`can_pack`.

    ``padded_rows`` is the row stride of the transposed codes, a multiple of 128. Without ``MASKED``
    it equals ``rows``. With ``BLOCK`` every tile is whole.
    """
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    left = tl.minimum(rows - tile_row * 128, 128).to(tl.int32)
    x_ptr += tile_row * 128 * stride_row + tile_col * 128
    codes_ptr += tile_row * 128 * cols + tile_col * 128
    codes_t_ptr += tile_col * 128 * padded_rows + tile_row * 128
    if BLOCK:
        quantize_packed_tile(
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
        # One side after the other; the second read comes from the cache. A tile that is kept in
        # registers would take too many of them.
        if ROWWISE:
            quantize_packed_tile(
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
            quantize_packed_tile(
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

"""Triton kernel for bfloat16 operands that quantizes four packed values at a time.

It serves tensors whose columns fill 128x128 tiles, on Hopper or later, and takes half the
instructions of the general kernel of :mod:`fp8rl.numerics.triton.dual`, which is bound by them.

A tile is loaded as 64-bit words of four values each, and as four tensors: the rows 4i, 4i+1, 4i+2
and 4i+3. A thread therefore holds squares of 4x4 values. Magnitudes are compared two at a time;
four codes are one 32-bit word; a square of codes is transposed by permuting bytes in registers, so
that the transposed codes go through shared memory as words too.
"""

# mypy: disable-error-code="assignment"
# The unrolled loops of the kernels make tuples longer, for which mypy has no type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.triton.quantize import (
    encode,
    has_packed_maximum,
    one_per_thread,
    quantization_scales,
)

PACKED_REGISTERS = 64  # registers of a thread: four programs fit a multiprocessor
# Bytes of two words, numbered as for the instruction prmt; the lowest digit comes first.
_LOW_BYTES = tl.constexpr(0x5140)  # a0 b0 a1 b1
_HIGH_BYTES = tl.constexpr(0x7362)  # a2 b2 a3 b3
_LOW_HALVES = tl.constexpr(0x5410)  # a0 a1 b0 b1
_HIGH_HALVES = tl.constexpr(0x7632)  # a2 a3 b2 b3


def can_pack(x: torch.Tensor) -> bool:
    """Whether rows of ``x`` can be read as aligned 64-bit words, on Hopper or later."""
    return (
        has_packed_maximum(x.device)
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
def _max_of_four(x, NATIVE: tl.constexpr):
    return _max_pair(_max_pair(x[0], x[1], NATIVE), _max_pair(x[2], x[3], NATIVE), NATIVE)


@triton.jit
def _column_max(pairs, NATIVE: tl.constexpr):
    """The largest magnitudes of two columns of a tile, from the pairs of the four row sets."""
    a, b, c, d = pairs
    a, b, c, d = a & 0x7FFF7FFF, b & 0x7FFF7FFF, c & 0x7FFF7FFF, d & 0x7FFF7FFF
    return _reduce_max(_max_of_four((a, b, c, d), NATIVE), 0, False, NATIVE)


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
def _encode_packed(packed, scales, NATIVE: tl.constexpr):
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
                _scaled(low << 16, scales[0]),
                _scaled(low & -65536, scales[1]),
                _scaled(high << 16, scales[2]),
                _scaled(high & -65536, scales[3]),
            ],
            tl.int32,
            True,
            1,
        )
    values = (low << 16, low & -65536, high << 16, high & -65536)
    word = tl.zeros(low.shape, tl.int32)
    for i in tl.static_range(4):
        code = encode(values[i].to(tl.float32, bitcast=True), scales[i], NATIVE)
        word |= code.to(tl.int32) << (8 * i)
    return word


@triton.jit
def _permute(a, b, BYTES: tl.constexpr, NATIVE: tl.constexpr):
    """A word of bytes of ``a`` (numbers 0 to 3) and ``b`` (4 to 7), as ``BYTES`` lists them."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {BYTES};", "=r,r,r", [a, b], tl.int32, True, 1
        )
    word = tl.zeros(a.shape, tl.int32)
    for i in tl.static_range(4):
        source = b if (BYTES >> (4 * i)) & 4 else a
        word |= ((source >> (8 * ((BYTES >> (4 * i)) & 3))) & 0xFF) << (8 * i)
    return word


@triton.jit
def _store_words(at, codes, line, left, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, codes, (line < left)[:, None])
    else:
        tl.store(at, codes)


@triton.jit
def _store_rows(at, stride, left, codes, MASKED: tl.constexpr):
    line = tl.arange(0, 32) * 4
    for i in tl.static_range(4):
        _store_words(at + i * stride, codes[i], line + i, left, MASKED)


@triton.jit
def _store_columns(at, stride, codes, NATIVE: tl.constexpr):
    a = _permute(codes[0], codes[1], _LOW_BYTES, NATIVE)
    b = _permute(codes[2], codes[3], _LOW_BYTES, NATIVE)
    tl.store(at, tl.trans(_permute(a, b, _LOW_HALVES, NATIVE)))
    tl.store(at + stride, tl.trans(_permute(a, b, _HIGH_HALVES, NATIVE)))
    a = _permute(codes[0], codes[1], _HIGH_BYTES, NATIVE)
    b = _permute(codes[2], codes[3], _HIGH_BYTES, NATIVE)
    tl.store(at + 2 * stride, tl.trans(_permute(a, b, _LOW_HALVES, NATIVE)))
    tl.store(at + 3 * stride, tl.trans(_permute(a, b, _HIGH_HALVES, NATIVE)))


@triton.jit
def _interleave(x):
    """Interleave four ``[32]`` tensors to ``[128]``, one value a thread."""
    pairs = tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))
    return one_per_thread(tl.reshape(pairs, (128,)))


@triton.jit
def _every_fourth(x, DIM: tl.constexpr):
    """The values 0, 4, 8.. of ``x``, its values 1, 5, 9.., and so on, with a new dimension."""
    parts = ()
    for i in tl.static_range(4):
        # A reshape would leave copies in each thread, and each copy would be divided by.
        parts += (tl.expand_dims(tl.gather(x, tl.arange(0, 32) * 4 + i, 0), DIM),)
    return parts


@triton.jit
def _encode_all(x, scales, NATIVE: tl.constexpr):
    """Codes of the four row sets ``x``; the columns 4i to 4i+3 have the four ``scales``."""
    codes = ()
    for i in tl.static_range(4):
        codes += (_encode_packed(x[i], scales, NATIVE),)
    return codes


@triton.jit
def packed_pointers(words_ptr, step):
    """Pointers to the words of the rows 0, 4, 8.. of a tile with ``step`` words a row."""
    word = tl.arange(0, 32)
    return words_ptr + (word * 4)[:, None] * step + word[None, :]


@triton.jit
def load_packed(at, first, left, MASKED: tl.constexpr):
    """Load every fourth row of a tile from row ``first`` on; rows from ``left`` on are zeros."""
    if MASKED:
        return tl.load(at, (tl.arange(0, 32) * 4 + first < left)[:, None], other=0)
    return tl.load(at)


@triton.jit
def _words_at(side):
    """Pointers to the words of the rows 0, 4, 8.., a pointer to the scales, and words a row."""
    codes_ptr, scale_inv_ptr, stride = side
    step = stride // 4
    return packed_pointers(codes_ptr.to(tl.pointer_type(tl.int32)), step), scale_inv_ptr, step


@triton.jit
def quantize_packed_groups(
    x, left, rowwise, columnwise, MASKED: tl.constexpr, POW2: tl.constexpr, NATIVE: tl.constexpr
):
    """Write codes and scales in 1x128 groups of a tile.

    ``x`` holds the rows 0, 4, 8.. of the tile, its rows 1, 5, 9.., and so on; the sides are as in
    :func:`quantize_packed_tile`. With ``MASKED`` the rowwise side is written up to row ``left``,
    and the columnwise side whole.
    """
    # Computed here rather than where they are used: ptxas spilled more registers there.
    if rowwise is not None:
        codes_at, scale_inv_ptr, width = _words_at(rowwise)
    if columnwise is not None:
        codes_t_at, scale_inv_t_ptr, height = _words_at(columnwise)
    line = tl.arange(0, 128)
    if rowwise is not None:
        amax = ()
        for i in tl.static_range(4):
            amax += (_amax_bits(_reduce_max(_max_in_word(x[i], NATIVE), 1, False, NATIVE)),)
        scale, scale_inv = quantization_scales(_interleave(amax), POW2)
        if MASKED:
            tl.store(scale_inv_ptr + line, scale_inv, line < left)
        else:
            tl.store(scale_inv_ptr + line, scale_inv)
        s0, s1, s2, s3 = _every_fourth(scale, 1)
        c0 = _encode_packed(x[0], (s0, s0, s0, s0), NATIVE)
        c1 = _encode_packed(x[1], (s1, s1, s1, s1), NATIVE)
        c2 = _encode_packed(x[2], (s2, s2, s2, s2), NATIVE)
        c3 = _encode_packed(x[3], (s3, s3, s3, s3), NATIVE)
        _store_rows(codes_at, width, left, (c0, c1, c2, c3), MASKED)
    if columnwise is not None:
        x0, x1, x2, x3 = x
        low = (low_pair(x0), low_pair(x1), low_pair(x2), low_pair(x3))
        low = _column_max(low, NATIVE)
        high = (high_pair(x0), high_pair(x1), high_pair(x2), high_pair(x3))
        high = _column_max(high, NATIVE)
        amax = _interleave((low << 16, low & 0x7FFF0000, high << 16, high & 0x7FFF0000))
        scale, scale_inv = quantization_scales(amax, POW2)
        tl.store(scale_inv_t_ptr + line, scale_inv)
        codes = _encode_all(x, _every_fourth(scale, 0), NATIVE)
        _store_columns(codes_t_at, height, codes, NATIVE)


@triton.jit
def quantize_packed_tile(
    x_ptr,
    stride_row,
    left,
    rowwise,
    columnwise,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    PADDED: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantize one 128x128 tile of a bfloat16 source; see :func:`can_pack`.

    A side is None if it is not wanted, or a tuple: pointers to the tile's first code and first
    scale, and the row stride of the codes. With ``MASKED`` the tile has ``left`` rows and the other
    rows are zeros, which are written to the rowwise side only with ``PADDED``. With ``BLOCK`` the
    tile has one scale and must be whole.
    """
    step = stride_row // 4
    at = packed_pointers(x_ptr.to(tl.pointer_type(tl.int64)), step)
    x = ()
    for i in tl.static_range(4):
        x += (load_packed(at + i * step, i, left, MASKED),)
    if BLOCK:
        # Computed here for the same reason as above.
        if rowwise is not None:
            codes_at, scale_inv_ptr, width = _words_at(rowwise)
        if columnwise is not None:
            codes_t_at, scale_inv_t_ptr, height = _words_at(columnwise)
        pairs = ()
        for i in tl.static_range(4):
            pairs += (_max_in_word(x[i], NATIVE),)
        pairs = _max_of_four(pairs, NATIVE)
        amax = _amax_bits(_reduce_max(_reduce_max(pairs, 1, False, NATIVE), 0, True, NATIVE))
        scale, scale_inv = quantization_scales(amax, POW2)
        s = scale[:, None]
        codes = _encode_all(x, (s, s, s, s), NATIVE)
        one = tl.arange(0, 1)
        if rowwise is not None:
            _store_rows(codes_at, width, 128, codes, False)
            tl.store(scale_inv_ptr + one, scale_inv)
        if columnwise is not None:
            _store_columns(codes_t_at, height, codes, NATIVE)
            tl.store(scale_inv_t_ptr + one, scale_inv)
    else:
        WRITE_MASKED: tl.constexpr = MASKED and not PADDED
        quantize_packed_groups(x, left, rowwise, columnwise, WRITE_MASKED, POW2, NATIVE)


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
        scale_at = scale_inv_ptr + tile_row * scale_stride + tile_col
        scale_t_at = scale_inv_t_ptr + tile_col * scale_t_stride + tile_row
        rowwise = (codes_ptr, scale_at, cols) if ROWWISE else None
        columnwise = (codes_t_ptr, scale_t_at, padded_rows) if COLUMNWISE else None
        quantize_packed_tile(
            x_ptr, stride_row, 128, rowwise, columnwise, True, False, False, POW2, NATIVE
        )
    else:
        # One side after the other; the second read comes from the cache. A tile that is kept in
        # registers would take too many of them.
        if ROWWISE:
            scale_at = scale_inv_ptr + tile_col * scale_stride + tile_row * 128
            rowwise = (codes_ptr, scale_at, cols)
            quantize_packed_tile(
                x_ptr, stride_row, left, rowwise, None, False, MASKED, False, POW2, NATIVE
            )
        if COLUMNWISE:
            scale_t_at = scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128
            columnwise = (codes_t_ptr, scale_t_at, padded_rows)
            quantize_packed_tile(
                x_ptr, stride_row, left, None, columnwise, False, MASKED, False, POW2, NATIVE
            )

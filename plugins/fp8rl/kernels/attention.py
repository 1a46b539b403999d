"""Attention with one arithmetic for decode, prompts and training, for Hopper GPUs.

:func:`fp8rl.kernels.paged.decode` reads a paged cache of 8 bits or in bfloat16, one query token a
program. :func:`attend` computes many query tokens in one program, over a 16-bit copy
(:func:`fp8rl.kernels.paged.copy_pages` of a cache, :func:`copy_tokens` of a trainer's K and V) or
over a trainer's K and V in bfloat16. Both give the same bits for a token in any batch:

* Keys are taken in tiles of 32 and parts of 1,024, in order; parts are added up in order.
* A tensor core adds products in groups of 16 along k, in order, in float32. ``mma.sync``, for 16
  rows, and ``wgmma``, for 64, give the same bits as long as each group has the same members. For
  8-bit operands that are converted in registers Triton puts the elements with ``k % 4 < 2`` of each
  32 into the first group, the others into the second; the 16-bit copy has them in that order.
  Operands in bfloat16 stay in their own.
* The sum of the probabilities is a product with ones, so that no layout decides its order.
* No multiplication is fused with an addition (``enable_fp_fusion=False``).

Measured on an H100: ``docs/measurements/exact.md``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import LEAST_INT8_SCALE
from fp8rl.numerics.triton.kv_cache import quantize_int8_rows, round_to_e4m3

HEAD_SIZES = (64, 128, 256)
"""Head sizes that are served, powers of two."""
LOG2_E = 1.4426950408889634
PART = 1024
"""Keys of a part; fewer cost large batches time, more cost small ones."""
TILE = 32
ONES = 16
"""Columns of ones that probabilities are multiplied with, the fewest of a product."""


class Copy(NamedTuple):
    """Keys and values of some sequences in 16 bits, codes in the order of :func:`swapped`."""

    keys: torch.Tensor
    """``[tokens, kv_heads, head_size]``, contiguous: codes in float16, each sequence padded to a
    multiple of 32, or the keys themselves in bfloat16."""
    values: torch.Tensor
    key_scales: torch.Tensor | None
    """float32, one element, or ``[tokens, kv_heads]`` where each token and head has its own; None
    in bfloat16."""
    value_scales: torch.Tensor | None
    starts: torch.Tensor
    """int32 ``[sequences]``: first token of each sequence."""
    lengths: torch.Tensor
    """int32 ``[sequences]``: keys of each sequence."""


@triton.jit
def swapped(index, PLAIN: tl.constexpr):
    """Return where the element of each place of the copy lies in its 32."""
    if not PLAIN:
        index = index // 32 * 32 + index % 32 // 16 * 2 + index % 16 // 2 * 4 + index % 2
    return index


@triton.jit
def operand(codes, NATIVE: tl.constexpr):
    """Return the values of E4M3 codes, or of INT8 codes with 128 added, as float16.

    Elements in bfloat16 stay as they are.
    """
    x = codes
    if codes.dtype == tl.uint8:
        # A float16 of 1024 + n has n in its lowest bits. An integer's own conversion is slow.
        if NATIVE:
            x = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0x64646464, 0x4140; prmt.b32 $1, $2, 0x64646464, 0x4342;",
                "=r,=r,r",
                [codes],
                tl.float16,
                True,
                4,
            )
        else:
            x = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        x -= 1152.0
    if codes.dtype != tl.bfloat16:
        x = x.to(tl.float16)
    return x


@triton.jit
def _exponent(scale):
    """Return the smallest integer above log2 of a positive float32, from its bits."""
    return ((scale.to(tl.int32, bitcast=True) >> 23) - 126).to(tl.float32)


@triton.jit
def update(
    q,
    k,
    v,
    ones,
    k_scale,
    v_scale,
    factor,
    keep,
    top,
    v_top,
    total,
    acc,
    BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr = True,
):
    """Add one tile of keys and values to the running softmax.

    With ``ones`` the sum of the probabilities is a product with them, and ``v_top`` is the exponent
    of the largest scale of V that each row has seen; ``acc`` is relative to it, since float16 may
    be too small for a probability times a scale. With None, which takes fewer registers, the layout
    decides the order of the sum, and V's scales are in the exponents of the probabilities.

    ``v`` may be codes: converted as late as here they take fewer registers.
    """
    s = tl.dot(q, tl.trans(k)) * factor[:, None]
    if BY_TOKEN:
        s *= k_scale[None, :]
        if ones is None:
            # A page that nothing was written to has any scale, 0 too: vLLM captures graphs over it.
            v_scale = tl.where(v_scale <= 0, 1.0, v_scale)
            s += tl.log2(v_scale)[None, :]
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    base = higher
    if MASKED:  # a row that has seen no key: -inf - -inf is NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(top - base)
    weights = p.to(q.dtype)
    if ones is None:
        if BY_TOKEN:
            p *= (1.0 / v_scale)[None, :]
        total = total * fade + tl.sum(p, 1)
    else:
        total = tl.dot(weights, ones, acc=total * fade[:, None])
        if BY_TOKEN:
            if MASKED:
                largest = tl.max(tl.where(keep, v_scale[None, :] + tl.zeros_like(s), 0.0), 1)
            else:
                largest = tl.max(v_scale, 0)
            v_higher = tl.maximum(v_top, _exponent(largest))
            weights = (p * v_scale[None, :] * tl.exp2(-v_higher)[:, None]).to(q.dtype)
            fade *= tl.exp2(v_top - v_higher)
            v_top = v_higher
    acc = tl.dot(weights, operand(v, NATIVE), acc=acc * fade[:, None])
    return higher, v_top, total, acc


@triton.jit
def load_queries(q_ptr, at, live, dim, softmax_scale, k_scale_ptr, BY_TOKEN: tl.constexpr):
    """Load queries, for keys in bfloat16 (no scale) as they are.

    Else as float16, which has 3 more bits but a smaller range, so that each row is divided by its
    largest magnitude.

    Returns:
        the queries; the factor of each row's scores.
    """
    q = tl.load(q_ptr + at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
    factor = tl.zeros_like(at).to(tl.float32) + softmax_scale
    if k_scale_ptr is not None:
        wide = q.to(tl.float32)
        norm = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        q = (wide / norm[:, None]).to(tl.float16)
        factor = norm * softmax_scale
        if not BY_TOKEN:
            factor *= tl.load(k_scale_ptr)
    return q, factor


@triton.jit
def weights_of_parts(top, v_top, part_top, part_v_top, BY_TOKEN: tl.constexpr):
    """Return how parts are added: the new maxima, and the factors of sums and accumulators."""
    new = tl.maximum(top, part_top)
    old_factor = tl.where(top == float("-inf"), 0.0, tl.exp2(top - new))
    part_factor = tl.where(part_top == float("-inf"), 0.0, tl.exp2(part_top - new))
    new_v, old_acc, part_acc = v_top, old_factor, part_factor
    if BY_TOKEN:
        new_v = tl.maximum(v_top, part_v_top)
        old_acc = old_factor * tl.exp2(v_top - new_v)
        part_acc = part_factor * tl.exp2(part_v_top - new_v)
    return new, new_v, old_factor, part_factor, old_acc, part_acc


@triton.jit
def first_column(x, ONES: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, ONES)[None, :] == 0, x, 0.0), 1)


@triton.jit
def final_factor(total, v_top, v_scale_ptr, BY_TOKEN: tl.constexpr):
    # A padded row of a captured batch has no keys: write zeros, not 0 / 0.
    factor = 1.0 / tl.where(total > 0, total, 1.0)
    if BY_TOKEN:
        factor *= tl.exp2(v_top)
    elif v_scale_ptr is not None:
        factor *= tl.load(v_scale_ptr)
    return factor


@triton.jit
def _copy_tokens_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    places_ptr,
    starts_ptr,
    lengths_ptr,
    scales_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    BY_TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
):
    head = tl.program_id(0)
    heads = tl.num_programs(0)  # no constant: with a batch's sequences there are many numbers
    sequence = tl.program_id(1)
    start = tl.program_id(2) * TILE
    length = tl.load(lengths_ptr + sequence)
    if start < length:
        lane = tl.arange(0, TILE)
        dim = tl.arange(0, HEAD)
        token = start + swapped(lane, False)
        inside = (token < length)[:, None]
        source = (tl.load(places_ptr + sequence) + token).to(tl.int64)[:, None]
        at_k = source * stride_k_token + head * stride_k_head + swapped(dim, False)[None, :]
        at_v = source * stride_v_token + head * stride_v_head + dim[None, :]
        k = tl.load(k_ptr + at_k, mask=inside, other=0.0)
        v = tl.load(v_ptr + at_v, mask=inside, other=0.0)
        row = (tl.load(starts_ptr + sequence) + start + lane).to(tl.int64) * heads + head
        target = row[:, None] * HEAD + dim[None, :]
        if BY_TOKEN:
            codes, k_scale = quantize_int8_rows(k, LEAST)
            tl.store(keys_ptr + target, (codes.to(tl.float32) - 128.0).to(tl.float16))
            codes, v_scale = quantize_int8_rows(v, LEAST)
            tl.store(values_ptr + target, (codes.to(tl.float32) - 128.0).to(tl.float16))
            tl.store(key_scales_ptr + row, k_scale)
            tl.store(value_scales_ptr + row, tl.where(token < length, v_scale, 0.0))
        else:
            one = tl.full(k.shape, 1.0, tl.float32)
            k = round_to_e4m3(tl.div_rn(k.to(tl.float32), one * tl.load(scales_ptr)))
            v = round_to_e4m3(tl.div_rn(v.to(tl.float32), one * tl.load(scales_ptr + 1)))
            tl.store(keys_ptr + target, k.to(tl.float16))
            tl.store(values_ptr + target, v.to(tl.float16))


def copy_tokens(
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    *,
    longest: int,
    scales: torch.Tensor | None,
) -> Copy:
    """Quantize K and V of some sequences as the rollout's cache does, for :func:`attend`.

    Args:
        key, value: ``[tokens, kv_heads, head_size]``, bfloat16; the last dimension is contiguous.
        starts: int32 ``[sequences + 1]``: first token of each sequence, and the end.
        longest: tokens of the longest sequence, or more.
        scales: float32 ``[2]``, of K and of V, for E4M3; None for INT8.
    """
    heads, size = key.shape[1:]
    of_layer = (key, value) if scales is None else (scales[:1], scales[1:])
    lengths = starts.diff()
    copy = empty_copy(lengths, len(key), heads, size, scales is None, of_layer)
    _copy_tokens_kernel[(heads, len(lengths), triton.cdiv(longest, TILE))](
        key,
        value,
        copy.keys,
        copy.values,
        copy.key_scales,
        copy.value_scales,
        starts,
        copy.starts,
        lengths,
        key if scales is None else scales,
        *key.stride()[:2],
        *value.stride()[:2],
        BY_TOKEN=scales is None,
        HEAD=size,
        TILE=TILE,
        LEAST=LEAST_INT8_SCALE,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return copy


def empty_copy(
    lengths: torch.Tensor,
    keys: int,
    heads: int,
    size: int,
    by_token: bool,
    of_layer: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Copy:
    """Return an uninitialised copy with room for each sequence, padded to whole tiles."""
    padded = (lengths + TILE - 1) // TILE * TILE
    starts = (padded.cumsum(0) - padded).to(torch.int32)
    tokens = (keys // TILE + len(lengths)) * TILE
    dtype = torch.bfloat16 if of_layer[0] is None else torch.float16
    codes = torch.empty(2, tokens, heads, size, dtype=dtype, device=lengths.device)
    if by_token:
        of_layer = tuple(torch.empty(2, tokens, heads, device=lengths.device))  # type: ignore[assignment]
    return Copy(codes[0], codes[1], *of_layer, starts, lengths)


@triton.jit
def _attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    query_starts_ptr,
    starts_ptr,
    lengths_ptr,
    k_scale_ptr,
    v_scale_ptr,
    softmax_scale,
    queries,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    BY_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    ONES: tl.constexpr,
    STAGES: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // PACK
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest ones first
    kv_head = tl.program_id(1) * PACK // GROUP
    sequence = tl.program_id(2)
    first_query = tl.load(query_starts_ptr + sequence)
    count = tl.load(query_starts_ptr + sequence + 1) - first_query
    if block * TOKENS < count:
        PLAIN: tl.constexpr = k_scale_ptr is None
        length = tl.load(lengths_ptr + sequence)
        before = length - count + block * TOKENS  # keys before those of this block's first query
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, HEAD)
        lane = tl.arange(0, TILE)
        head = tl.program_id(1) * PACK + row % PACK
        token = before + row // PACK
        live = token < length
        query = (first_query + block * TOKENS + row // PACK).to(tl.int64)
        at_q = query * stride_q_token + head * stride_q_head
        q, factor = load_queries(
            q_ptr, at_q, live, swapped(dim, PLAIN), softmax_scale, k_scale_ptr, BY_TOKEN
        )
        kv_heads = tl.num_programs(1) * PACK // GROUP
        base = tl.load(starts_ptr + sequence).to(tl.int64) * kv_heads + kv_head
        ones = tl.full([TILE, ONES], 1.0, tl.float32).to(q.dtype)
        k_scale = tl.full([TILE], 1.0, tl.float32)
        v_scale = tl.full([TILE], 1.0, tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        v_top = tl.full([ROWS], -126.0, tl.float32)
        sums = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD], tl.float32)
        whole = (before + 1) // TILE * TILE  # tiles that every query sees whole
        end = tl.cdiv(tl.minimum(before + TOKENS, length), TILE) * TILE
        for first in range(0, end, PART):
            last = tl.minimum(first + PART, end)
            full = tl.maximum(tl.minimum(whole, last), first)
            part_top = tl.full([ROWS], float("-inf"), tl.float32)
            part_v_top = tl.full([ROWS], -126.0, tl.float32)
            total = tl.zeros([ROWS, ONES], tl.float32)
            part = tl.zeros([ROWS, HEAD], tl.float32)
            for start in tl.range(first, full, TILE, num_stages=STAGES):
                place = base + (start + lane) * kv_heads
                at = place[:, None] * HEAD + dim[None, :]
                if BY_TOKEN:
                    k_scale = tl.load(k_scale_ptr + place)
                    v_scale = tl.load(v_scale_ptr + place)
                part_top, part_v_top, total, part = update(
                    q,
                    tl.load(k_ptr + at),
                    tl.load(v_ptr + at),
                    ones,
                    k_scale,
                    v_scale,
                    factor,
                    None,
                    part_top,
                    part_v_top,
                    total,
                    part,
                    BY_TOKEN,
                    False,
                )
            for start in tl.range(full, last, TILE):
                place = base + (start + lane) * kv_heads
                at = place[:, None] * HEAD + dim[None, :]
                if BY_TOKEN:
                    k_scale = tl.load(k_scale_ptr + place)
                    v_scale = tl.load(v_scale_ptr + place)
                if PLAIN:  # what comes after the last key may be NaN, and 0 * NaN is NaN
                    inside = (start + lane < length)[:, None]
                    k = tl.load(k_ptr + at, mask=inside, other=0.0)
                    v = tl.load(v_ptr + at, mask=inside, other=0.0)
                else:
                    k = tl.load(k_ptr + at)
                    v = tl.load(v_ptr + at)
                part_top, part_v_top, total, part = update(
                    q,
                    k,
                    v,
                    ones,
                    k_scale,
                    v_scale,
                    factor,
                    (start + swapped(lane, PLAIN))[None, :] <= token[:, None],
                    part_top,
                    part_v_top,
                    total,
                    part,
                    BY_TOKEN,
                    True,
                )
            top, v_top, a, b, acc_a, acc_b = weights_of_parts(
                top, v_top, part_top, part_v_top, BY_TOKEN
            )
            sums = sums * a + first_column(total, ONES) * b
            acc = acc * acc_a[:, None] + part * acc_b[:, None]
        acc *= final_factor(sums, v_top, v_scale_ptr, BY_TOKEN)[:, None]
        out = out_ptr + (query * stride_out_token + head * stride_out_head)[:, None] + dim[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
        lse = (top + tl.log2(sums)) * 0.6931471805599453
        tl.store(lse_ptr + head.to(tl.int64) * queries + query, lse, mask=live)


def attend(
    query: torch.Tensor,
    copy: Copy,
    query_starts: torch.Tensor,
    *,
    longest_query: int,
    softmax_scale: float,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute causal attention of the last tokens of some sequences.

    Args:
        query: ``[queries, heads, head_size]``, bfloat16, one sequence after the other.
        copy: their keys and values.
        query_starts: int32 ``[sequences + 1]``: first query of each sequence, and the end.
        longest_query: queries of one sequence at most.
        softmax_scale: factor of the scores.
        out: like ``query``; None for a new one, which is 0 behind the last sequence.

    Returns:
        ``out``, with the bits of :func:`fp8rl.kernels.paged.decode`; the log-sum-exp of the
        scores, float32 ``[heads, queries]``.
    """
    queries, heads, size = query.shape
    group = heads // copy.keys.shape[1]
    pack = next(n for n in (4, 2, 1) if group % n == 0)
    rows = 64
    out = torch.zeros_like(query) if out is None else out
    lse = torch.empty(heads, queries, dtype=torch.float32, device=query.device)
    blocks = triton.cdiv(longest_query, rows // pack)
    _attend_kernel[(blocks, heads // pack, len(copy.lengths))](
        query,
        copy.keys,
        copy.values,
        out,
        lse,
        query_starts,
        copy.starts,
        copy.lengths,
        copy.key_scales,
        copy.value_scales,
        softmax_scale * LOG2_E,
        queries,
        *query.stride()[:2],
        *out.stride()[:2],
        BY_TOKEN=copy.key_scales is not None and copy.key_scales.ndim == 2,
        GROUP=group,
        PACK=pack,
        ROWS=rows,
        HEAD=size,
        TILE=TILE,
        PART=PART,
        ONES=ONES,
        STAGES=3,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out, lse

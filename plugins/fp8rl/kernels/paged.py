"""Attention over a paged KV cache of 8 bits or in bfloat16, for Hopper GPUs.

A decode step reads the whole cache once and computes little, so memory bandwidth limits it.
FlashAttention 3 converts and transposes V inside its tensor-core pipeline and reads an FP8 cache at
60% of an H100's bandwidth, a BF16 one at 83% (``docs/measurements/kernels.md``). :func:`decode`
converts codes, E4M3 or INT8, to float16, which represents every one of them, when it loads them
into registers. Queries and probabilities stay in 16 bits; FlashAttention 3 rounds both to E4M3.

Prompts read a 16-bit copy of their keys and values: :func:`dequantize_pages` makes the one of
FlashAttention, :func:`copy_pages` the one of :func:`fp8rl.kernels.attention.attend`.

Layout of the cache: ``vllm/v1/attention/backends/flash_attn.py`` for E4M3 with a scale a layer,
:mod:`vllm_fp8rl.attention.pages.int8_layout` for INT8 with a scale for each token and head. A
sequence is split over several programs as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.kernels.attention import (
    LOG2_E,
    ONES,
    PART,
    TILE,
    Copy,
    empty_copy,
    final_factor,
    first_column,
    load_queries,
    operand,
    swapped,
    update,
    weights_of_parts,
)

_LEAST_ROWS = 16  # of a tensor core's product
_MOST_SPLITS = 32
_FEW_SPLITS = 4  # at most this many where a batch nearly fills the GPU
_STATE, _STATE_OF_PARTS = 2, 4
"""Numbers of a split's state behind its accumulator: maximum, sum. Of a part's: these, exponent of
V's scales, none. A combination of splits with 4 would add across warps, up to 10% of a decode."""
_COPY_TILE = 64  # tokens
_BEHIND = 256
"""Rows behind the last request that FlashAttention may read: more than one of its tiles of keys."""


@triton.jit
def _slots(start, lane, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the page of the sequence, and the slot in that page, of tokens ``start + lane``."""
    if PAGE % TILE == 0 or TILE % PAGE == 0:  # start is a multiple of TILE: no division per token
        return start // PAGE + lane // PAGE, start % PAGE + lane % PAGE
    return (start + lane) // PAGE, (start + lane) % PAGE


@triton.jit(do_not_specialize=["splits", "parts"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    ones_ptr,
    out_ptr,
    state_ptr,
    table_ptr,
    lengths_ptr,
    k_scale_ptr,
    v_scale_ptr,
    softmax_scale,
    stride_q_token,
    stride_q_head,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_scale_page,
    stride_scale_slot,
    stride_scale_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    splits,
    parts,
    BY_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    ONES: tl.constexpr,
    STATE: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Attend with the queries of one KV head over its share of a sequence's keys.

    With ``PART`` the keys are taken in parts of so many, whatever ``splits`` is; with None a
    program's share is one part.
    """
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    if PART is None:
        share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
        begin = split * share
        end = tl.maximum(tl.minimum(begin + share, length), begin)
    else:  # whole parts
        share = tl.cdiv(tl.cdiv(length, PART), splits) * PART
        begin = tl.minimum(split * share, length)
        end = tl.minimum(begin + share, length)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD)
    live = row < GROUP
    head = kv_head * GROUP + row
    at_q = sequence * stride_q_token + head * stride_q_head
    q, factor = load_queries(q_ptr, at_q, live, dim, softmax_scale, k_scale_ptr, BY_TOKEN)

    table = table_ptr + sequence * stride_table
    lane = tl.arange(0, TILE)
    column = dim[None, :] + kv_head * stride_kv_head
    scale_column = kv_head * stride_scale_head
    zero: tl.constexpr = 128 if BY_TOKEN else 0.0
    ones = None
    if PART is not None:
        # Loaded in the codes' dtype, so that Triton orders them as it orders V.
        ones = tl.load(ones_ptr + lane[:, None] * ONES + tl.arange(0, ONES)[None, :])
        ones = operand(ones, NATIVE)
    k_scale = tl.full([TILE], 1.0, tl.float32)
    v_scale = tl.full([TILE], 1.0, tl.float32)
    index = (sequence * tl.num_programs(0) * GROUP + head) * parts
    top = tl.full([ROWS], float("-inf"), tl.float32)
    STEP: tl.constexpr = 1 if PART is None else PART
    LEAST: tl.constexpr = 0.0 if PART is None else -126.0
    v_top = tl.full([ROWS], LEAST, tl.float32)
    sums = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    # Without PART the bounds are constants, so that the compiler makes no loop.
    for at in range(0 if PART is None else begin, 1 if PART is None else end, STEP):
        first = begin if PART is None else at
        last = end if PART is None else tl.minimum(first + PART, end)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        v_top = tl.full([ROWS], LEAST, tl.float32)
        total = tl.zeros([ROWS] if PART is None else [ROWS, ONES], tl.float32)
        acc = tl.zeros([ROWS, HEAD], tl.float32)
        # Whole tiles without masks, then the rest with: each instruction in this loop costs time.
        full = first + (last - first) // TILE * TILE
        for start in tl.range(first, full, TILE, num_stages=STAGES):
            number, offset = _slots(start, lane, PAGE, TILE)
            page = tl.load(table + number).to(tl.int64)
            slot = (page * stride_page + offset * stride_slot)[:, None] + column
            k = operand(tl.load(k_ptr + slot), NATIVE)
            v = tl.load(v_ptr + slot)
            if PART is not None:  # else later, in fewer registers
                v = operand(v, NATIVE)
            if BY_TOKEN:
                token = page * stride_scale_page + offset * stride_scale_slot + scale_column
                k_scale = tl.load(k_scale_ptr + token)
                v_scale = tl.load(v_scale_ptr + token)
            top, v_top, total, acc = update(
                q,
                k,
                v,
                ones,
                k_scale,
                v_scale,
                factor,
                None,
                top,
                v_top,
                total,
                acc,
                BY_TOKEN,
                False,
                NATIVE,
            )
        if full < last:
            # Slots past the end may hold any bits, NaN too, and 0 * NaN is NaN.
            inside = lane < last - full
            number, offset = _slots(full, lane, PAGE, TILE)
            page = tl.load(table + number, mask=inside, other=0).to(tl.int64)
            slot = (page * stride_page + offset * stride_slot)[:, None] + column
            k = operand(tl.load(k_ptr + slot, mask=inside[:, None], other=zero), NATIVE)
            v = tl.load(v_ptr + slot, mask=inside[:, None], other=zero)
            if PART is not None:
                v = operand(v, NATIVE)
            if BY_TOKEN:
                token = page * stride_scale_page + offset * stride_scale_slot + scale_column
                k_scale = tl.load(k_scale_ptr + token, mask=inside, other=1.0)
                v_scale = tl.load(v_scale_ptr + token, mask=inside, other=0.0)
            top, v_top, total, acc = update(
                q,
                k,
                v,
                ones,
                k_scale,
                v_scale,
                factor,
                inside[None, :],
                top,
                v_top,
                total,
                acc,
                BY_TOKEN,
                True,
                NATIVE,
            )
        if PART is None:
            sums = total
            state = state_ptr + (index + split) * (HEAD + STATE)
        else:
            sums = first_column(total, ONES)
            # A program that has all parts adds them up in the place of the first one's state: in
            # registers a second accumulator would cost the loop over tiles its occupancy.
            place = index + tl.where(splits == 1, 0, first // PART)
            state = state_ptr + place * (HEAD + STATE)
            if (splits == 1) & (first > begin):
                old_top = tl.load(state + HEAD, mask=live, other=0.0)
                old_sums = tl.load(state + HEAD + 1, mask=live, other=0.0)
                old_v_top = tl.load(state + HEAD + 2, mask=live, other=0.0)
                old = tl.load(state[:, None] + dim[None, :], mask=live[:, None], other=0.0)
                top, v_top, a, b, acc_a, acc_b = weights_of_parts(
                    old_top, old_v_top, top, v_top, BY_TOKEN
                )
                sums = old_sums * a + sums * b
                acc = old * acc_a[:, None] + acc * acc_b[:, None]
        if (splits > 1) | (last < end):  # not constants: a second kernel takes a second to compile
            tl.store(state[:, None] + dim[None, :], acc, mask=live[:, None])
            tl.store(state + HEAD, top, mask=live)
            tl.store(state + HEAD + 1, sums, mask=live)
            if PART is not None:
                tl.store(state + HEAD + 2, v_top, mask=live)
                tl.debug_barrier()  # other threads of this program read it
    if splits == 1:
        acc *= final_factor(sums, v_top, v_scale_ptr, BY_TOKEN)[:, None]
        out = out_ptr + sequence * stride_out_token + head[:, None] * stride_out_head + dim[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["parts"])
def _combine_kernel(
    state_ptr,
    out_ptr,
    lengths_ptr,
    v_scale_ptr,
    stride_out_token,
    stride_out_head,
    parts,
    BY_TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    PART: tl.constexpr,
    MOST: tl.constexpr,
    STATE: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, HEAD)
    state = state_ptr + (sequence * tl.num_programs(0) + head) * parts * (HEAD + STATE)
    if PART is None:  # all at once
        split = tl.arange(0, MOST)
        made = split < parts
        state += split * (HEAD + STATE)
        tops = tl.load(state + HEAD, mask=made, other=float("-inf"))
        totals = tl.load(state + HEAD + 1, mask=made, other=0.0)
        accs = tl.load(state[:, None] + dim[None, :], mask=made[:, None], other=0.0)
        weight = tl.where(totals > 0, tl.exp2(tops - tl.max(tops, 0)), 0.0)
        v_top = 0.0
        sums = tl.sum(totals * weight, 0)
        acc = tl.sum(accs * weight[:, None], 0)
    else:  # in order
        top = float("-inf")
        v_top = -126.0
        sums = 0.0
        acc = tl.zeros([HEAD], tl.float32)
        for _ in range(tl.cdiv(tl.load(lengths_ptr + sequence), PART)):
            part_top = tl.load(state + HEAD)
            part_v_top = tl.load(state + HEAD + 2)
            top, v_top, a, b, acc_a, acc_b = weights_of_parts(
                top, v_top, part_top, part_v_top, BY_TOKEN
            )
            sums = sums * a + tl.load(state + HEAD + 1) * b
            acc = acc * acc_a + tl.load(state + dim) * acc_b
            state += HEAD + STATE
    acc *= final_factor(sums, v_top, v_scale_ptr, BY_TOKEN)
    out = out_ptr + sequence * stride_out_token + head * stride_out_head + dim
    tl.store(out, acc.to(out_ptr.dtype.element_ty))


def splits_for(sequences: int, kv_heads: int, processors: int, *, exact: bool) -> int:
    """Return the number of programs per sequence and KV head, enough to fill the GPU.

    It depends on nothing that changes between replays of a captured graph.

    Args:
        sequences: number of sequences in the batch.
        kv_heads: number of KV heads on this rank.
        processors: number of SMs of the GPU.
        exact: whether :func:`decode` gets ones, with which its parts are larger.
    """
    programs = (4 if exact else 8) * processors
    splits = 1
    while splits < _MOST_SPLITS and sequences * kv_heads * splits < programs:
        splits *= 2
    return splits


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    splits: int,
    ones: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``softmax(q @ k.T * softmax_scale) @ v`` for one query token per sequence.

    Args:
        query: ``[sequences, heads, head_size]``, bfloat16 or float16.
        key_cache, value_cache: ``[pages, page_size, kv_heads, head_size]``, bfloat16, or codes:
            E4M3, or uint8 for INT8 with 128 added; both have the same strides, and the last
            dimension is contiguous.
        block_table: int32 ``[sequences, pages of the longest]``.
        seq_lens: int32 ``[sequences]``; 0 for a padded row, whose output is 0.
        softmax_scale: factor of the scores.
        k_scale, v_scale: float32, read on the GPU at each launch: one element, or positive ones
            ``[pages, page_size, kv_heads]`` of the same strides; None for bfloat16.
        out: like ``query``.
        splits: number of programs per sequence and KV head, 1 to 32; see :func:`splits_for`.
        ones: :func:`ones_like_codes` of the cache, for the bits of
            :func:`fp8rl.kernels.attention.attend` with any ``splits``; None for the fastest, which
            divides the keys of a sequence by ``splits`` and adds in an order of its own.

    Returns:
        ``out``.
    """
    sequences, heads, size = query.shape
    page, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = heads // kv_heads
    exact = ones is not None
    by_token = k_scale is not None and k_scale.ndim == 3
    parts = triton.cdiv(block_table.shape[1] * page, PART) if exact else splits
    if parts == 1:
        splits = 1
    places = sequences * heads * parts if parts > 1 else 1
    part, width = (PART, _STATE_OF_PARTS) if exact else (None, _STATE)
    state = torch.empty(places * (size + width), dtype=torch.float32, device=out.device)
    _decode_kernel[(kv_heads, sequences, splits)](
        query,
        key_cache,
        value_cache,
        ones,
        out,
        state,
        block_table,
        seq_lens,
        k_scale,
        v_scale,
        softmax_scale * LOG2_E,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *_strides(k_scale),
        *out.stride()[:2],
        block_table.stride(0),
        splits,
        parts,
        BY_TOKEN=by_token,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)),
        HEAD=size,
        PAGE=page,
        TILE=TILE,
        PART=part,
        ONES=ONES,
        STATE=width,
        STAGES=5 if by_token and not exact else 4,
        NATIVE=query.is_cuda,
        num_warps=1,  # needs no barrier, and 8 programs fit
        enable_fp_fusion=not exact,
    )
    if splits > 1:
        _combine_kernel[(heads, sequences)](
            state,
            out,
            seq_lens,
            v_scale,
            *out.stride()[:2],
            parts,
            BY_TOKEN=by_token,
            HEAD=size,
            PART=part,
            # Lanes of splits that do not exist take as long as the others.
            MOST=_FEW_SPLITS if splits <= _FEW_SPLITS else _MOST_SPLITS,
            STATE=width,
            num_warps=1 if exact else 4,
            enable_fp_fusion=not exact,
        )
    return out


def _strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of scales, where each token and head has its own."""
    return scale.stride() if scale is not None and scale.ndim == 3 else (0, 0, 0)


def ones_like_codes(codes: torch.Tensor) -> torch.Tensor:
    """Return ones for :func:`decode`, in the dtype and on the device of a cache."""
    one = 129.0 if codes.dtype == torch.uint8 else 1.0
    return torch.full((TILE, ONES), one, device=codes.device).to(codes.dtype)


@triton.jit(do_not_specialize=["tokens"])  # or a step with other numbers compiles again
def _copy_pages_kernel(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    starts_ptr,
    lengths_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tokens,
    stride_page,
    stride_slot,
    stride_kv_head,
    stride_scale_page,
    stride_scale_slot,
    stride_scale_head,
    stride_table,
    BY_TOKEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BEHIND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1)
    start = tl.program_id(2) * TILE
    VALUES: tl.constexpr = lengths_ptr is None  # codes times scales; else codes, and scales apart
    PLAIN: tl.constexpr = VALUES or k_scale_ptr is None
    first = tl.load(starts_ptr + request)
    behind = request == tl.num_programs(1) - 1 if VALUES else False
    if VALUES:
        if behind:
            length = tl.minimum(tokens - first, BEHIND)
        else:
            length = tl.load(starts_ptr + request + 1) - first
    else:
        length = tl.load(lengths_ptr + request)
    if start < length:
        lane = tl.arange(0, TILE)
        dim = tl.arange(0, HEAD)
        token = swapped(lane, PLAIN)
        inside = (start + token < length) & (not behind)
        number, offset = _slots(start, token, PAGE, TILE)
        table = table_ptr + request.to(tl.int64) * stride_table
        page = tl.load(table + number, mask=inside, other=0).to(tl.int64)
        slot = page * stride_page + offset * stride_slot + head * stride_kv_head
        zero: tl.constexpr = 128 if BY_TOKEN else 0.0
        at_k = slot[:, None] + swapped(dim, PLAIN)[None, :]
        k = tl.load(k_ptr + at_k, mask=inside[:, None], other=zero)
        v = tl.load(v_ptr + slot[:, None] + dim[None, :], mask=inside[:, None], other=zero)
        k = operand(k, NATIVE)
        v = operand(v, NATIVE)
        row = (first + start + lane).to(tl.int64) * HEADS + head
        target = row[:, None] * HEAD + dim[None, :]
        if BY_TOKEN:
            at = page * stride_scale_page + offset * stride_scale_slot + head * stride_scale_head
            # Behind the last token codes are not ``zero``: of four bytes Triton 3.6 fills one with
            # 128, and three with 255.
            k_scale = tl.load(k_scale_ptr + at, mask=inside, other=0.0 if VALUES else 1.0)
            v_scale = tl.load(v_scale_ptr + at, mask=inside, other=0.0)
        if VALUES:
            if BY_TOKEN:
                k = k.to(tl.float32) * k_scale[:, None]
                v = v.to(tl.float32) * v_scale[:, None]
            else:
                k = k.to(tl.float32) * tl.load(k_scale_ptr)
                v = v.to(tl.float32) * tl.load(v_scale_ptr)
            written = (start + lane < length)[:, None]
            tl.store(keys_ptr + target, k.to(keys_ptr.dtype.element_ty), mask=written)
            tl.store(values_ptr + target, v.to(values_ptr.dtype.element_ty), mask=written)
        else:
            tl.store(keys_ptr + target, k)
            tl.store(values_ptr + target, v)
            if BY_TOKEN:
                tl.store(key_scales_ptr + row, k_scale)
                tl.store(value_scales_ptr + row, v_scale)


def copy_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    keys: int,
    longest: int,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> Copy:
    """Copy the keys and values of some requests, for :func:`fp8rl.kernels.attention.attend`.

    Args:
        key_cache, value_cache, k_scale, v_scale: as :func:`decode` takes them.
        block_table: int32 ``[requests, pages of the longest]``.
        lengths: int32 ``[requests]``: keys of each.
        keys: keys of all requests, or more.
        longest: keys of the longest request, or more.
    """
    page, heads, size = key_cache.shape[1:]
    by_token = k_scale is not None and k_scale.ndim == 3
    copy = empty_copy(lengths, keys, heads, size, by_token, (k_scale, v_scale))
    _copy_pages_kernel[(heads, len(lengths), triton.cdiv(longest, TILE))](
        key_cache,
        value_cache,
        copy.keys,
        copy.values,
        copy.key_scales,
        copy.value_scales,
        block_table,
        copy.starts,
        lengths,
        k_scale,
        v_scale,
        None,
        *key_cache.stride()[:3],
        *_strides(k_scale),
        block_table.stride(0),
        BY_TOKEN=by_token,
        HEADS=heads,
        HEAD=size,
        PAGE=page,
        TILE=TILE,
        BEHIND=0,
        NATIVE=key_cache.is_cuda,
        num_warps=1,
    )
    return copy


def dequantize_pages(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    *,
    tokens: int,
    longest: int,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys and values of requests, one request after the other.

    FlashAttention 3 takes an FP8 cache only with queries and probabilities in E4M3, which costs 3%
    of the result (``docs/measurements/places.md``). Over a copy in the dtype of the queries it
    rounds nothing but what it would over a cache of 16 bits. With scales that are powers of two the
    copy has exactly the values of an E4M3 cache. Values of an INT8 cache are rounded to the dtype
    of the copy.

    Where ``tokens`` is too large, rows behind the last request are zero as far as FlashAttention
    reads: it multiplies them with probabilities of zero, and zero times NaN is NaN.

    Args:
        key_cache, value_cache: codes as :func:`decode` takes them.
        block_table: int32 ``[requests, pages of the longest]``.
        starts: int32 ``[requests + 1]``, the first token of each request in the copy.
        tokens: number of tokens of the copy, at least the last of ``starts``.
        longest: number of tokens of the longest request, or more.
        k_scale, v_scale: as :func:`decode` takes them.
        dtype: bfloat16 or float16.

    Returns:
        keys and values ``[tokens, kv_heads, head_size]``.
    """
    page, heads, size = key_cache.shape[1:]
    shape = (2, tokens, heads, size)
    keys, values = torch.empty(shape, dtype=dtype, device=key_cache.device).unbind()
    tiles = triton.cdiv(max(longest, _BEHIND), _COPY_TILE)
    _copy_pages_kernel[(heads, len(block_table) + 1, tiles)](
        key_cache,
        value_cache,
        keys,
        values,
        None,
        None,
        block_table,
        starts,
        None,
        k_scale,
        v_scale,
        tokens,
        *key_cache.stride()[:3],
        *_strides(k_scale),
        block_table.stride(0),
        BY_TOKEN=k_scale.ndim == 3,
        HEADS=heads,
        HEAD=size,
        PAGE=page,
        TILE=_COPY_TILE,
        BEHIND=_BEHIND,
        NATIVE=key_cache.is_cuda,
        num_warps=4,
    )
    return keys, values

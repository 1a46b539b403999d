"""Attention of one new token per sequence over a paged KV cache of 8 bits, for Hopper GPUs.

A decode step reads the whole cache once and computes little, so memory bandwidth limits it.
FlashAttention 3 converts and transposes V inside its tensor-core pipeline and reads an FP8 cache at
60% of an H100's bandwidth, a BF16 one at 83% (``docs/measurements/kernels.md``). This kernel
converts codes, E4M3 or INT8, to float16, which represents every one of them, when it loads them
into registers. Queries and probabilities stay in 16 bits; FlashAttention 3 rounds both to E4M3.

Layout of the cache: ``vllm/v1/attention/backends/flash_attn.py`` for E4M3 with a scale a layer,
:mod:`vllm_fp8rl.attention.pages.int8_layout` for INT8 with a scale for each token and head. A
sequence is split over several programs as in Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 32
_FEW_SPLITS = 4  # at most this many where a batch nearly fills the GPU
_TILE = 32  # tokens; one warp per program needs no barrier, and 8 programs fit
_STAGES = 4
_STAGES_BY_TOKEN = 5
_ROWS = 16  # the smallest number of rows that a tensor core multiplies


@triton.jit
def slots(start, lane, PAGE: tl.constexpr, TILE: tl.constexpr):
    """Return the page of the sequence, and the slot in that page, of tokens ``start + lane``."""
    if PAGE % TILE == 0 or TILE % PAGE == 0:  # start is a multiple of TILE: no division per token
        return start // PAGE + lane // PAGE, start % PAGE + lane % PAGE
    return (start + lane) // PAGE, (start + lane) % PAGE


@triton.jit
def to_float16(codes, NATIVE: tl.constexpr):
    """Return the values of E4M3 codes, or of INT8 codes with 128 added, as float16."""
    if codes.dtype == tl.uint8:
        # A float16 of 1024 + n has n in its lowest bits. An integer's own conversion is slow.
        if NATIVE:
            raised = tl.inline_asm_elementwise(
                "prmt.b32 $0, $2, 0x64646464, 0x4140; prmt.b32 $1, $2, 0x64646464, 0x4342;",
                "=r,=r,r",
                [codes],
                tl.float16,
                True,
                4,
            )
        else:
            raised = (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
        return raised - 1152.0
    return codes.to(tl.float16)


@triton.jit
def _update(
    q,
    k,
    v,
    k_scale,
    v_scale,
    factor,
    inside,
    top,
    total,
    acc,
    BY_TOKEN: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Add one tile of keys and values to the running softmax."""
    s = tl.dot(q, tl.trans(to_float16(k, NATIVE))) * factor[:, None]
    if BY_TOKEN:
        # A page that nothing was written to has any scale, 0 too: vLLM captures graphs over such.
        v_scale = tl.where(v_scale <= 0, 1.0, v_scale)
        # The scale of V goes into the exponent, since float16 may be too small for a product.
        s = s * k_scale[None, :] + tl.log2(v_scale)[None, :]
    if MASKED:
        s = tl.where(inside[None, :], s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    fade = tl.exp2(top - higher)
    if BY_TOKEN:
        total = total * fade + tl.sum(p * (1.0 / v_scale)[None, :], 1)
    else:
        total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(tl.float16), to_float16(v, NATIVE), acc=acc * fade[:, None])
    return higher, total, acc


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
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
    BY_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + sequence)
    share = tl.cdiv(tl.cdiv(length, splits), TILE) * TILE
    first = split * share
    last = tl.maximum(tl.minimum(first + share, length), first)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD)
    live = row < GROUP
    head = kv_head * GROUP + row
    q = tl.load(
        q_ptr
        + sequence.to(tl.int64) * stride_q_token
        + head[:, None] * stride_q_head
        + dim[None, :],
        mask=live[:, None],
        other=0.0,
    ).to(tl.float32)
    # float16 has 3 more bits than bfloat16 but a smaller range: scale each row into it.
    norm = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)
    q = (q / norm[:, None]).to(tl.float16)
    factor = norm * softmax_scale
    if not BY_TOKEN:
        factor *= tl.load(k_scale_ptr)

    table = table_ptr + sequence.to(tl.int64) * stride_table
    lane = tl.arange(0, TILE)
    column = dim[None, :] + kv_head * stride_kv_head
    scale_column = kv_head * stride_scale_head
    k_scale = tl.full([TILE], 1.0, tl.float32)
    v_scale = tl.full([TILE], 1.0, tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD], tl.float32)
    # Whole tiles without masks, then the rest with: each instruction in this loop costs time.
    full = first + (last - first) // TILE * TILE
    for start in tl.range(first, full, TILE, num_stages=STAGES):
        number, offset = slots(start, lane, PAGE, TILE)
        page = tl.load(table + number).to(tl.int64)
        slot = (page * stride_page + offset * stride_slot)[:, None] + column
        k = tl.load(k_ptr + slot)
        v = tl.load(v_ptr + slot)
        if BY_TOKEN:
            token = page * stride_scale_page + offset * stride_scale_slot + scale_column
            k_scale = tl.load(k_scale_ptr + token)
            v_scale = tl.load(v_scale_ptr + token)
        inside = lane < TILE
        top, total, acc = _update(
            q, k, v, k_scale, v_scale, factor, inside, top, total, acc, BY_TOKEN, False, NATIVE
        )
    if full < last:
        # Slots past the end may hold any bits, NaN too, and 0 * NaN is NaN.
        inside = lane < last - full
        number, offset = slots(full, lane, PAGE, TILE)
        page = tl.load(table + number, mask=inside, other=0).to(tl.int64)
        slot = (page * stride_page + offset * stride_slot)[:, None] + column
        k = tl.load(k_ptr + slot, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + slot, mask=inside[:, None], other=0.0)
        if BY_TOKEN:
            token = page * stride_scale_page + offset * stride_scale_slot + scale_column
            k_scale = tl.load(k_scale_ptr + token, mask=inside, other=1.0)
            v_scale = tl.load(v_scale_ptr + token, mask=inside, other=1.0)
        top, total, acc = _update(
            q, k, v, k_scale, v_scale, factor, inside, top, total, acc, BY_TOKEN, True, NATIVE
        )

    if splits == 1:  # not a constant: a second kernel would take more than a second to compile
        # A padded row of a captured batch has length 0: write zeros, not 0 / 0.
        factor = 1.0 / tl.where(total > 0, total, 1.0)
        if not BY_TOKEN:
            factor *= tl.load(v_scale_ptr)
        acc = acc * factor[:, None]
        where = out_ptr + sequence.to(tl.int64) * stride_out_token
        tl.store(
            where + head[:, None] * stride_out_head + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=live[:, None],
        )
    else:
        heads = tl.num_programs(0) * GROUP
        index = (sequence.to(tl.int64) * heads + head) * splits + split
        part = state_ptr + index * (HEAD + 2)
        tl.store(part[:, None] + dim[None, :], acc, mask=live[:, None])
        tl.store(part + HEAD, top, mask=live)
        tl.store(part + HEAD + 1, total, mask=live)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    state_ptr,
    out_ptr,
    v_scale_ptr,
    stride_out_token,
    stride_out_head,
    splits,
    BY_TOKEN: tl.constexpr,
    HEAD: tl.constexpr,
    MOST: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, HEAD)
    split = tl.arange(0, MOST)
    made = split < splits
    part = state_ptr + ((sequence * tl.num_programs(0) + head) * splits + split) * (HEAD + 2)
    top = tl.load(part + HEAD, mask=made, other=float("-inf"))
    total = tl.load(part + HEAD + 1, mask=made, other=0.0)
    acc = tl.load(part[:, None] + dim[None, :], mask=made[:, None], other=0.0)
    highest = tl.max(top, 0)
    weight = tl.where(total > 0, tl.exp2(top - highest), 0.0)
    whole = tl.sum(total * weight, 0)
    acc = tl.sum(acc * weight[:, None], 0)
    factor = 1.0 / tl.where(whole > 0, whole, 1.0)
    if not BY_TOKEN:
        factor *= tl.load(v_scale_ptr)
    acc = acc * factor
    where = out_ptr + sequence * stride_out_token + head * stride_out_head + dim
    tl.store(where, acc.to(out_ptr.dtype.element_ty))


def splits_for(sequences: int, kv_heads: int, processors: int) -> int:
    """Return the number of programs per sequence and KV head, enough to fill the GPU.

    It depends on nothing that changes between replays of a captured graph.

    Args:
        sequences: number of sequences in the batch.
        kv_heads: number of KV heads on this rank.
        processors: number of SMs of the GPU.
    """
    splits = 1
    while splits < _MOST_SPLITS and sequences * kv_heads * splits < 8 * processors:
        splits *= 2
    return splits


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    out: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    """Compute ``softmax(q @ k.T * softmax_scale) @ v`` for one query token per sequence.

    Args:
        query: ``[sequences, heads, head_size]``, bfloat16 or float16.
        key_cache, value_cache: codes ``[pages, page_size, kv_heads, head_size]``, E4M3, or uint8
            for INT8 with 128 added; both have the same strides, and the last dimension is
            contiguous.
        block_table: int32 ``[sequences, pages of the longest]``.
        seq_lens: int32 ``[sequences]``; 0 for a padded row, whose output is 0.
        softmax_scale: factor of the logits.
        k_scale, v_scale: float32, read on the GPU at each launch: one element, or positive ones
            ``[pages, page_size, kv_heads]`` of the same strides.
        out: output, like ``query``.
        splits: number of programs per sequence and KV head, 1 to 32; see :func:`splits_for`.

    Returns:
        ``out``.
    """
    sequences, heads, size = query.shape
    page, kv_heads = key_cache.shape[1], key_cache.shape[2]
    group = heads // kv_heads
    rows = max(_ROWS, triton.next_power_of_2(group))
    by_token = k_scale.ndim == 3
    parts = sequences * heads * splits * (size + 2) if splits > 1 else 0
    state = torch.empty(parts, dtype=torch.float32, device=out.device)
    _attend[(kv_heads, sequences, splits)](
        query,
        key_cache,
        value_cache,
        out,
        state,
        block_table,
        seq_lens,
        k_scale,
        v_scale,
        softmax_scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        *(k_scale.stride() if by_token else (0, 0, 0)),
        out.stride(0),
        out.stride(1),
        block_table.stride(0),
        splits,
        BY_TOKEN=by_token,
        GROUP=group,
        ROWS=rows,
        HEAD=size,
        PAGE=page,
        TILE=_TILE,
        STAGES=_STAGES_BY_TOKEN if by_token else _STAGES,
        NATIVE=query.is_cuda,
        num_warps=1,
    )
    if splits > 1:
        # Lanes of splits that do not exist take as long as the others.
        most = _FEW_SPLITS if splits <= _FEW_SPLITS else _MOST_SPLITS
        _combine[(heads, sequences)](
            state,
            out,
            v_scale,
            out.stride(0),
            out.stride(1),
            splits,
            BY_TOKEN=by_token,
            HEAD=size,
            MOST=most,
        )
    return out

"""A 16-bit copy of the keys and values that some requests have in a paged cache of 8 bits.

FlashAttention 3 takes an FP8 cache only with queries and probabilities in E4M3, which costs 3% of
the result (``docs/measurements/places.md``). Over a copy in the dtype of the queries it rounds
nothing but what it would over a cache of 16 bits. With scales that are powers of two the copy has
exactly the values of an E4M3 cache. Values of an INT8 cache are rounded to the dtype of the copy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_fp8rl.attention.decode import slots, to_float16

_TILE = 64  # tokens
_BEHIND = 256
"""Rows behind the last request that FlashAttention may read: more than one of its tiles of keys."""


@triton.jit(do_not_specialize=["tokens"])  # or a step with other numbers compiles anew
def _dequantize(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    starts_ptr,
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
    first = tl.load(starts_ptr + request)
    behind = request == tl.num_programs(1) - 1
    if behind:
        length = tl.minimum(tokens - first, BEHIND)
    else:
        length = tl.load(starts_ptr + request + 1) - first
    if start < length:
        lane = tl.arange(0, TILE)
        dim = tl.arange(0, HEAD)[None, :]
        written = start + lane < length
        inside = written & (not behind)
        number, offset = slots(start, lane, PAGE, TILE)
        table = table_ptr + request.to(tl.int64) * stride_table
        page = tl.load(table + number, mask=inside, other=0).to(tl.int64)
        source = (page * stride_page + offset * stride_slot)[:, None] + head * stride_kv_head + dim
        row = (first + start + lane).to(tl.int64) * HEADS + head
        target = row[:, None] * HEAD + dim
        k = tl.load(k_ptr + source, mask=inside[:, None], other=0.0)
        v = tl.load(v_ptr + source, mask=inside[:, None], other=0.0)
        k = to_float16(k, NATIVE).to(tl.float32)
        v = to_float16(v, NATIVE).to(tl.float32)
        if BY_TOKEN:
            token = page * stride_scale_page + offset * stride_scale_slot + head * stride_scale_head
            k *= tl.load(k_scale_ptr + token, mask=inside, other=0.0)[:, None]
            v *= tl.load(v_scale_ptr + token, mask=inside, other=0.0)[:, None]
        else:
            k *= tl.load(k_scale_ptr)
            v *= tl.load(v_scale_ptr)
        tl.store(keys_ptr + target, k.to(keys_ptr.dtype.element_ty), mask=written[:, None])
        tl.store(values_ptr + target, v.to(values_ptr.dtype.element_ty), mask=written[:, None])


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

    Where ``tokens`` is too large, rows behind the last request are zero as far as FlashAttention
    reads: it multiplies them with probabilities of zero, and zero times NaN is NaN.

    Args:
        key_cache, value_cache: codes ``[pages, page_size, kv_heads, head_size]``, E4M3, or uint8
            for INT8 with 128 added; both have the same strides, and the last dimension is
            contiguous.
        block_table: int32 ``[requests, pages of the longest]``.
        starts: int32 ``[requests + 1]``, the first token of each request in the copy.
        tokens: number of tokens of the copy, at least the last of ``starts``.
        longest: number of tokens of the longest request, or more.
        k_scale, v_scale: float32, read on the GPU at each launch: one element, or
            ``[pages, page_size, kv_heads]`` of the same strides.
        dtype: bfloat16 or float16.

    Returns:
        keys and values ``[tokens, kv_heads, head_size]``.
    """
    page, heads, size = key_cache.shape[1:]
    shape = (2, tokens, heads, size)
    keys, values = torch.empty(shape, dtype=dtype, device=key_cache.device).unbind()
    tiles = triton.cdiv(max(longest, _BEHIND), _TILE)
    by_token = k_scale.ndim == 3
    _dequantize[(heads, len(block_table) + 1, tiles)](
        key_cache,
        value_cache,
        keys,
        values,
        block_table,
        starts,
        k_scale,
        v_scale,
        tokens,
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        *(k_scale.stride() if by_token else (0, 0, 0)),
        block_table.stride(0),
        BY_TOKEN=by_token,
        HEADS=heads,
        HEAD=size,
        PAGE=page,
        TILE=_TILE,
        BEHIND=_BEHIND,
        NATIVE=key_cache.is_cuda,
    )
    return keys, values

"""Pages of a KV cache in INT8 with a scale for each token and KV head, and the kernel that writes.

vLLM's ``int8_per_token_head`` puts each scale behind the codes of its head, so that rows of 132
bytes lie at addresses that no wide load takes. A page has the same bytes here in another order: the
codes of K, those of V, the scales of K, those of V. No scale is calibrated or sent: the largest
magnitude of a row is 127 of its steps. Codes are stored with 128 added, as
:func:`vllm_fp8rl.attention.paged_decode.to_float16` reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from fp8rl.errors import UnsupportedError

SCALE_BYTES = 4
"""Bytes of a scale, float32; vLLM counts them for each token, KV head, and K or V."""
_LEAST = 1e-6
"""Smallest scale, as in vLLM: a row of zeros has one too."""


class Int8Pages(NamedTuple):
    """Views of a KV cache."""

    keys: torch.Tensor
    """uint8 ``[pages, page_size, kv_heads, head_size]``."""
    values: torch.Tensor
    key_scales: torch.Tensor
    """float32 ``[pages, page_size, kv_heads]``."""
    value_scales: torch.Tensor


def int8_pages(cache: torch.Tensor, kv_heads: int, head_size: int) -> Int8Pages:
    """Return the views of a layer's cache.

    Args:
        cache: what vLLM allocates for ``int8_per_token_head``, int8: the page is the first
            dimension, the token in it the third, and the bytes of a page lie together.
        kv_heads: number of KV heads of this rank.
        head_size: size of a head.

    Raises:
        UnsupportedError: pages of other sizes, or whose bytes are apart.
    """
    pages, page = cache.shape[0], cache.shape[2]
    rows = page * kv_heads
    size = 2 * rows * (head_size + SCALE_BYTES)
    sides = zip(cache.shape[1:], cache.stride()[1:], strict=True)
    reach = 1 + sum((length - 1) * stride for length, stride in sides)
    if cache[0].numel() != size or reach != size or cache.stride(0) % SCALE_BYTES:
        raise UnsupportedError(
            f"A page of the KV cache has the shape {tuple(cache.shape[1:])} and the strides "
            f"{cache.stride()[1:]}, which are not {size:,} bytes in one piece for {page} tokens, "
            f"{kv_heads} KV heads and a head size of {head_size}; unset VLLM_KV_CACHE_LAYOUT, or "
            "set kv_cache.dtype to auto, and kv_cache_dtype of the engine too."
        )
    # Few operations: eager steps do this for each layer, and the host sets their pace.
    codes, floats = cache.view(torch.uint8), cache.view(torch.float32)
    stride, offset, half = cache.stride(0), cache.storage_offset(), rows * head_size
    shape = pages, page, kv_heads, head_size
    strides = stride, kv_heads * head_size, head_size, 1
    by_row, steps = (pages, page, kv_heads), (stride // SCALE_BYTES, kv_heads, 1)
    first = (offset + 2 * half) // SCALE_BYTES
    return Int8Pages(
        codes.as_strided(shape, strides, offset),
        codes.as_strided(shape, strides, offset + half),
        floats.as_strided(by_row, steps, first),
        floats.as_strided(by_row, steps, first + rows),
    )


@triton.jit
def _quantize(row, LEAST: tl.constexpr):
    """Return the codes of rows, with 128 added, and their scales."""
    row = row.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(row), 1) / 127.0, LEAST)
    scale += tl.sum(row * 0.0, 1)  # NaN where a value is not finite; the maximum passes over NaN
    return (row / scale[:, None] + 128.5).to(tl.uint8), scale


@triton.jit
def _write(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots_ptr,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_page,
    stride_scale_page,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    LEAST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:  # a padded token has none
        head = tl.arange(0, ROWS)
        dim = tl.arange(0, HEAD)[None, :]
        live = head < HEADS
        row = (slot % PAGE) * HEADS + head
        target = (slot // PAGE) * stride_page + row[:, None] * HEAD + dim
        scale_target = (slot // PAGE) * stride_scale_page + row
        source = token * stride_k_token + head[:, None] * stride_k_head + dim
        codes, scale = _quantize(tl.load(k_ptr + source, mask=live[:, None], other=0.0), LEAST)
        tl.store(keys_ptr + target, codes, mask=live[:, None])
        tl.store(key_scales_ptr + scale_target, scale, mask=live)
        source = token * stride_v_token + head[:, None] * stride_v_head + dim
        codes, scale = _quantize(tl.load(v_ptr + source, mask=live[:, None], other=0.0), LEAST)
        tl.store(values_ptr + target, codes, mask=live[:, None])
        tl.store(value_scales_ptr + scale_target, scale, mask=live)


def write_int8(
    key: torch.Tensor, value: torch.Tensor, pages: Int8Pages, slot_mapping: torch.Tensor
) -> None:
    """Quantize the keys and values of new tokens into their slots.

    A row that has a value that is not finite gets the scale NaN, so that its attention is NaN.

    Args:
        key, value: ``[tokens, kv_heads, head_size]`` of 16 or 32 bits, perhaps with more tokens;
            head_size is a power of two.
        pages: the layer's cache.
        slot_mapping: int64 ``[tokens]``, page times page size plus the token's place in the page;
            negative for a token that has no slot.
    """
    page, heads, size = pages.keys.shape[1:]
    _write[(len(slot_mapping),)](
        key,
        value,
        *pages,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        pages.keys.stride(0),
        pages.key_scales.stride(0),
        PAGE=page,
        HEADS=heads,
        ROWS=triton.next_power_of_2(heads),
        HEAD=size,
        LEAST=_LEAST,
    )

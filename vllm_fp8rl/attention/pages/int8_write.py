"""The kernel that quantizes keys and values of new tokens into an INT8 KV cache.

Layout of the cache: :mod:`vllm_fp8rl.attention.pages.int8_layout`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import LEAST_INT8_SCALE
from fp8rl.numerics.triton.kv_cache import quantize_int8_rows
from vllm_fp8rl.attention.pages.int8_layout import Int8Pages


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
        k = tl.load(k_ptr + source, mask=live[:, None], other=0.0)
        codes, scale = quantize_int8_rows(k, LEAST)
        tl.store(keys_ptr + target, codes, mask=live[:, None])
        tl.store(key_scales_ptr + scale_target, scale, mask=live)
        source = token * stride_v_token + head[:, None] * stride_v_head + dim
        v = tl.load(v_ptr + source, mask=live[:, None], other=0.0)
        codes, scale = quantize_int8_rows(v, LEAST)
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
        *key.stride()[:2],
        *value.stride()[:2],
        pages.keys.stride(0),
        pages.key_scales.stride(0),
        PAGE=page,
        HEADS=heads,
        ROWS=triton.next_power_of_2(heads),
        HEAD=size,
        LEAST=LEAST_INT8_SCALE,
    )

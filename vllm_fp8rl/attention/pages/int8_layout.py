"""Pages of a KV cache in INT8 with a scale for each token and KV head.

vLLM's ``int8_per_token_head`` puts each scale behind the codes of its head, so that rows of 132
bytes lie at addresses that no wide load takes. A page has the same bytes here in another order: the
codes of K, those of V, the scales of K, those of V. No scale is calibrated or sent: the largest
magnitude of a row is 127 of its steps. Codes are stored with 128 added, as
:func:`fp8rl.kernels.attention.operand` reads them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8rl.errors import UnsupportedError

SCALE_BYTES = 4
"""Bytes of a scale, float32; vLLM counts them for each token, KV head, and K or V."""


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

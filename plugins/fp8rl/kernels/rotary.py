"""Rotary embedding of queries and keys by one table and one kernel in both engines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.kernels.norm import aligned, norm_tile, row_scale


@triton.jit
def _rotate_kernel(
    query_ptr,
    key_ptr,
    query_out_ptr,
    key_out_ptr,
    query_weight_ptr,
    key_weight_ptr,
    positions_ptr,
    table_ptr,
    query_token,
    query_head,
    key_token,
    key_head,
    sign,
    size,
    epsilon,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = head < HEADS + KEY_HEADS
    is_query = head < HEADS
    key = head - HEADS
    x_ptr = tl.where(
        is_query,
        query_ptr + token * query_token + head * query_head,
        key_ptr + token * key_token + key * key_head,
    )
    out_ptr = tl.where(
        is_query,
        query_out_ptr + (token * HEADS + head) * (2 * HALF),
        key_out_ptr + (token * KEY_HEADS + key) * (2 * HALF),
    )
    lane = tl.arange(0, HALF)[None, :]
    a = tl.load(x_ptr + lane, inside, other=0.0)
    b = tl.load(x_ptr + HALF + lane, inside, other=0.0).to(tl.float32)
    dtype = a.dtype
    a = a.to(tl.float32)
    if NORM:
        x = tl.load(x_ptr + tl.arange(0, WIDTH)[None, :], inside, other=0.0).to(tl.float32)
        scale = row_scale(x, size, epsilon)[:, None]
        weight = tl.where(is_query, query_weight_ptr, key_weight_ptr) + lane
        a = (a * scale * tl.load(weight).to(tl.float32)).to(dtype).to(tl.float32)
        b = (b * scale * tl.load(weight + HALF).to(tl.float32)).to(dtype).to(tl.float32)
    table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + lane
    cos = tl.load(table)
    sin = tl.load(table + HALF) * sign
    tl.store(out_ptr + lane, (a * cos - b * sin).to(dtype), inside)
    tl.store(out_ptr + HALF + lane, (b * cos + a * sin).to(dtype), inside)


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    back: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the halves of each head against each other, in float32, rounded once.

    Args:
        query: ``[tokens, heads, head_size]``, bfloat16 or float16.
        key: ``[tokens, key_heads, head_size]``, of ``query``'s dtype.
        positions: integers ``[tokens]``.
        table: :func:`fp8rl.kernels.rotary_table.cos_sin_table` of the head size, a power of
            two.
        norms: weights of a query's and a key's norm and epsilon, if the heads are normalized first,
            with the bits of :func:`fp8rl.kernels.norm.rms_norm`.
        back: whether to rotate the other way, as gradients are.

    Returns:
        new tensors like ``query`` and ``key``, contiguous.
    """
    tokens, heads, size = query.shape
    query, key = aligned(query), aligned(key)
    out = query.new_empty(query.shape), key.new_empty(key.shape)
    if tokens:
        tile = norm_tile(size)
        query_weight, key_weight, epsilon = norms or (query, key, 0.0)
        _rotate_kernel[(tokens, triton.cdiv(heads + key.shape[1], tile["ROWS"]))](
            query,
            key,
            *out,
            query_weight,
            key_weight,
            positions,
            table,
            *query.stride()[:2],
            *key.stride()[:2],
            -1.0 if back else 1.0,
            size,
            epsilon,
            HEADS=heads,
            KEY_HEADS=key.shape[1],
            HALF=size // 2,
            NORM=norms is not None,
            enable_fp_fusion=False,
            **tile,
        )
    return out

"""Rotary embedding of queries and keys by one table and one kernel in both engines."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def cos_sin_table(base: float, dim: int, length: int, device: torch.device) -> torch.Tensor:
    """Make the cosines and sines of all positions.

    In float64 on the CPU, rounded once: a GPU's functions have other last bits.

    Args:
        base: ``rope_theta`` of the model.
        dim: rotated numbers of a head.
        length: number of positions.
        device: where the table goes.

    Returns:
        float32 ``[length, dim]``: ``dim / 2`` cosines, then as many sines.
    """
    inverse = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), inverse)
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


@triton.jit
def _rotate_kernel(
    x_ptr,
    y_ptr,
    positions_ptr,
    table_ptr,
    stride_token,
    stride_head,
    sign,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, PADDED)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = head < HEADS
    table = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + lane
    cos = tl.load(table)
    sin = tl.load(table + HALF) * sign
    at = x_ptr + token * stride_token + head * stride_head + lane
    a = tl.load(at, inside, other=0.0)
    b = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
    dtype = a.dtype
    a = a.to(tl.float32)
    out = y_ptr + (token * HEADS + head) * (2 * HALF) + lane
    tl.store(out, (a * cos - b * sin).to(dtype), inside)
    tl.store(out + HALF, (b * cos + a * sin).to(dtype), inside)


def rotate(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, back: bool = False
) -> torch.Tensor:
    """Rotate the halves of each head against each other, in float32, rounded once.

    Args:
        x: ``[tokens, heads, head_size]``; the last dimension is contiguous.
        positions: integers ``[tokens]``.
        table: :func:`cos_sin_table` of the head size.
        back: whether to rotate the other way, as a gradient is.

    Returns:
        a new tensor like ``x``, contiguous.
    """
    tokens, heads, size = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if tokens:
        _rotate_kernel[(tokens,)](
            x,
            y,
            positions,
            table,
            x.stride(0),
            x.stride(1),
            -1.0 if back else 1.0,
            HEADS=heads,
            PADDED=triton.next_power_of_2(heads),
            HALF=size // 2,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y

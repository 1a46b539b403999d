"""The kernels of :mod:`fp8rl.gemm.triton_gemm`; this module needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics import GROUP, Quantized, cdiv

_TILE = 128  # a tile of B then has one block scale per step along K
_TILES_PER_COLUMN = 8  # tiles of A that are walked before the next column of B, for the L2 cache


@triton.jit
def _block_scaled_mm_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    m,
    n,
    k,
    stride_a,
    stride_b,
    stride_out_row,
    stride_out_col,
    stride_a_scale_row,
    stride_a_scale_group,
    stride_b_scale_row,
    stride_b_scale_group,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_TILES: tl.constexpr,
    B_BLOCKS: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    tiles_m = tl.cdiv(m, TILE)
    per_band = ROW_TILES * tl.cdiv(n, TILE)
    first = tl.program_id(0) // per_band * ROW_TILES
    band = tl.minimum(tiles_m - first, ROW_TILES)
    tile_m = first + tl.program_id(0) % per_band % band
    tile_n = tl.program_id(0) % per_band // band
    rows = tile_m.to(tl.int64) * TILE + tl.arange(0, TILE)
    cols = tile_n.to(tl.int64) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, GROUP)
    # Rows beyond the end read the last one again and are not stored.
    a_at = a_ptr + tl.minimum(rows, m - 1)[:, None] * stride_a + inner[None, :]
    b_at = b_ptr + tl.minimum(cols, n - 1)[None, :] * stride_b + inner[:, None]
    a_scale_at = a_scale_ptr + tl.minimum(rows, m - 1) * stride_a_scale_row
    if B_BLOCKS:
        b_scale_at = b_scale_ptr + tile_n.to(tl.int64) * stride_b_scale_row
    else:
        b_scale_at = b_scale_ptr + tl.minimum(cols, n - 1) * stride_b_scale_row
    total = tl.zeros((TILE, TILE), tl.float32)
    for step in range(tl.cdiv(k, GROUP)):
        if WHOLE_GROUPS:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            left = inner < k - step * GROUP
            a = tl.load(a_at, left[None, :], other=0.0)
            b = tl.load(b_at, left[:, None], other=0.0)
        # Tensor cores keep few bits of a long FP8 sum, so each group gets a sum of its own.
        part = tl.dot(a, b)
        a_scale = tl.load(a_scale_at + step * stride_a_scale_group)
        b_scale = tl.load(b_scale_at + step * stride_b_scale_group)
        if B_BLOCKS:
            total += part * (a_scale * b_scale)[:, None]
        else:
            total += part * a_scale[:, None] * b_scale[None, :]
        a_at += GROUP
        b_at += GROUP
    at = out_ptr + rows[:, None] * stride_out_row + cols[None, :] * stride_out_col
    inside = (rows < m)[:, None] & (cols < n)[None, :]
    if ACCUMULATE:
        total += tl.load(at, inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_ptr.dtype.element_ty), inside)


def block_scaled_mm(
    a: Quantized, b: Quantized, out: torch.Tensor, *, blocks: bool, accumulate: bool
) -> None:
    """Compute ``out = a @ b.T``, or ``out += a @ b.T``.

    Args:
        a: codes ``[M, K]``, scale_inv ``[M, ceil(K/128)]``.
        b: codes ``[N, K]``; scale_inv ``[ceil(N/128), ceil(K/128)]`` with ``blocks``, otherwise
            ``[N, ceil(K/128)]``.
        out: ``[M, N]``, any strides.
        blocks: whether the scales of ``b`` belong to 128x128 blocks.
        accumulate: whether the product is added to ``out``.
    """
    (m, k), n = a.codes.shape, len(b.codes)
    if not m or not n:
        return
    with torch.cuda.device_of(out):
        _block_scaled_mm_kernel[(cdiv(m, _TILE) * cdiv(n, _TILE),)](
            a.codes,
            a.scale_inv,
            b.codes,
            b.scale_inv,
            out,
            m,
            n,
            k,
            a.codes.stride(0),
            b.codes.stride(0),
            *out.stride(),
            *a.scale_inv.stride(),
            *b.scale_inv.stride(),
            TILE=_TILE,
            GROUP=GROUP,
            ROW_TILES=_TILES_PER_COLUMN,
            B_BLOCKS=blocks,
            WHOLE_GROUPS=k % GROUP == 0,
            ACCUMULATE=accumulate,
            num_warps=8,
            num_stages=4,
        )

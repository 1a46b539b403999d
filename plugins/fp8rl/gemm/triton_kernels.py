"""The kernels of :mod:`fp8rl.gemm.triton_gemm`; this module needs triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8rl.numerics import GROUP, Quantized, cdiv

_WIDE_STEP = 128
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
            out.stride(0),
            out.stride(1),
            a.scale_inv.stride(0),
            a.scale_inv.stride(1),
            b.scale_inv.stride(0),
            b.scale_inv.stride(1),
            TILE=_TILE,
            GROUP=GROUP,
            ROW_TILES=_TILES_PER_COLUMN,
            B_BLOCKS=blocks,
            WHOLE_GROUPS=k % GROUP == 0,
            ACCUMULATE=accumulate,
            num_warps=8,
            num_stages=4,
        )


def _set_blocks(arguments: dict[str, Any]) -> None:
    rows = arguments["TILE_M"]
    arguments["a_desc"].block_shape = [rows, _WIDE_STEP]
    arguments["out_desc"].block_shape = [rows, _WIDE_STEP]


def _wide(tile_m: int, halves: int, warps: int, stages: int) -> triton.Config:
    return triton.Config(
        {"TILE_M": tile_m, "HALVES": halves},
        num_warps=warps,
        num_stages=stages,
        pre_hook=_set_blocks,
    )


@triton.autotune(
    # Not k, the tokens: those of an expert are others in every step.
    configs=[_wide(128, 1, 8, 4), _wide(128, 2, 8, 3), _wide(64, 1, 4, 3)],
    key=["m", "n"],
)
@triton.jit
def _wide_groups_kernel(
    a_desc,
    b_desc,
    out_desc,
    a_scale_ptr,
    b_scale_ptr,
    m,
    n,
    k,
    a_scale_stride,
    b_scale_stride,
    ROW_TILES: tl.constexpr,
    TILE_M: tl.constexpr,
    HALVES: tl.constexpr,
):
    """Multiply operands in 1x128 groups, in whole tiles loaded by TMA.

    A tile is ``HALVES`` times 128 columns wide, one half after the other, so that the partial sums
    of one half fit in registers together with the totals of both.
    """
    tiles_m = tl.cdiv(m, TILE_M)
    per_band = ROW_TILES * tl.cdiv(n, 128 * HALVES)
    first = tl.program_id(0) // per_band * ROW_TILES
    band = tl.minimum(tiles_m - first, ROW_TILES)
    row = (first + tl.program_id(0) % per_band % band) * TILE_M
    col = tl.program_id(0) % per_band // band * 128 * HALVES
    rows = row + tl.arange(0, TILE_M)
    cols = col + tl.arange(0, 128)
    total = tl.zeros((TILE_M, 128), tl.float32)
    if HALVES == 2:
        right = tl.zeros((TILE_M, 128), tl.float32)
    for step in range(tl.cdiv(k, 128)):
        a = a_desc.load([row, step * 128])
        a_scale = tl.load(a_scale_ptr + step * a_scale_stride + rows)
        b = b_desc.load([col, step * 128])
        b_scale = tl.load(b_scale_ptr + step * b_scale_stride + cols)
        part = tl.dot(a, b.T)
        total += part * (a_scale[:, None] * b_scale[None, :])
        if HALVES == 2:
            b = b_desc.load([col + 128, step * 128])
            b_scale = tl.load(b_scale_ptr + step * b_scale_stride + cols + 128)
            part = tl.dot(a, b.T)
            right += part * (a_scale[:, None] * b_scale[None, :])
    out_desc.store([row, col], total.to(out_desc.dtype))
    if HALVES == 2:
        out_desc.store([row, col + 128], right.to(out_desc.dtype))


def wide_groups_mm(a: Quantized, b: Quantized, out: torch.Tensor) -> None:
    """Compute ``out = a @ b.T`` on Hopper, for shapes that :func:`is_wide` accepts.

    Args:
        a: codes ``[M, K]``, scale_inv ``[M, K/128]``, rows contiguous.
        b: codes ``[N, K]``, scale_inv ``[N, K/128]``, rows contiguous.
        out: ``[M, N]``, contiguous, bfloat16.
    """
    (m, k), n = a.codes.shape, len(b.codes)

    def grid(options: dict[str, Any]) -> tuple[int]:
        return (cdiv(m, options["TILE_M"]) * cdiv(n, 128 * options["HALVES"]),)

    block = [_TILE, _WIDE_STEP]
    with torch.cuda.device_of(out):
        _wide_groups_kernel[grid](
            TensorDescriptor.from_tensor(a.codes, block),
            TensorDescriptor.from_tensor(b.codes, block),
            TensorDescriptor.from_tensor(out, block),
            a.scale_inv,
            b.scale_inv,
            m,
            n,
            k,
            a.scale_inv.stride(1),
            b.scale_inv.stride(1),
            ROW_TILES=_TILES_PER_COLUMN,
        )


def is_wide(a: Quantized, b: Quantized) -> bool:
    """Tell whether all tiles are whole and every TMA load is aligned."""
    (m, k), n = a.codes.shape, len(b.codes)
    outermost = a.scale_inv.stride(0) == 1 and b.scale_inv.stride(0) == 1
    whole = m % 128 == 0 and n % 256 == 0 and k % 128 == 0
    return bool(m and n and k and whole and outermost)

"""Triton kernels that quantize rows, or compute SiLU and product and quantize them at once.

:mod:`fp8rl.kernels.norm` has the norm, :mod:`fp8rl.numerics.triton.swiglu` the activation alone.

They read and write memory once instead of twice. The activation is computed in float32 and rounded
once to its dtype, as by :mod:`fp8rl.numerics.triton.swiglu` in the trainer: a value that only one
engine rounds in between would flip codes. Codes and scales equal those of
:func:`fp8rl.numerics.quantize_group` on the separate result, up to the last bit of ``exp``.

A last group is filled with zeros, since block-scaled GEMMs multiply whole groups.

The scales of one group lie side by side in memory, which these GEMMs read in place. TMA
needs a multiple of 16 bytes between groups, so that rows are padded to a multiple of four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import FP8_DTYPE, GROUP, whole_groups
from fp8rl.numerics.triton.quantize import has_native_cast, quantize_groups
from fp8rl.numerics.triton.swiglu import swiglu
from fp8rl.recipe import ScaleFormat

_FEW_ROWS = 512  # up to this many, tiles are small, to occupy every multiprocessor


# Batches have any number of rows: one kernel serves all, so that none is compiled in a step.
@triton.jit(do_not_specialize=["rows", "stride_scale"])
def _rows_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    columns,
    stride_row,
    stride_scale,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    SILU: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = row < rows
    there = inside[:, None]
    stride_codes = columns
    if not WHOLE:
        there = there & (column < columns)[None, :]
        stride_codes = tl.cdiv(columns, GROUP) * GROUP
    at = x_ptr + row[:, None] * stride_row + column[None, :]
    x = tl.load(at, there, other=0.0)
    if SILU:
        up = tl.load(at + columns, there, other=0.0)
        x = swiglu(x.to(tl.float32), up.to(tl.float32), NATIVE).to(x.dtype)
    codes, scale_inv = quantize_groups(x.to(tl.float32), POW2)
    tl.store(codes_ptr + row[:, None] * stride_codes + column[None, :], codes, inside[:, None])
    tl.store(scale_ptr + group * stride_scale + row, scale_inv, inside)


def empty_rows(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes and scales for the rows of ``x``; symbolic shapes work too.

    Returns:
        codes ``[rows, columns padded to 128]``; scale_inv float32 ``[ceil(columns / 128), rows
        padded to 4]``.
    """
    rows, width = x.shape[0], whole_groups(columns)
    codes = torch.empty(rows, width, dtype=FP8_DTYPE, device=x.device)
    padded = (rows + 3) // 4 * 4
    scales = torch.empty(width // GROUP, padded, dtype=torch.float32, device=x.device)
    return codes, scales


def quantize_rows(
    x: torch.Tensor, scale_format: ScaleFormat, *, silu_and_mul: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations in 1x128 groups, after ``silu(x[:, :K]) * x[:, K:]`` if asked.

    ``x`` is ``[M, K]``, or ``[M, 2 K]`` with ``silu_and_mul``, in 16 bits. The result is that of
    :func:`empty_rows`, with zeros behind K.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape[0], x.shape[1] // 2 if silu_and_mul else x.shape[1]
    codes, scales = empty_rows(x, columns)
    if rows:
        tile = 8 if rows <= _FEW_ROWS else 32
        _rows_kernel[(triton.cdiv(rows, tile), len(scales))](
            x,
            codes.view(torch.uint8),
            scales,
            rows,
            columns,
            x.stride(0),
            scales.stride(0),
            TILE=tile,
            GROUP=GROUP,
            WHOLE=columns % GROUP == 0,
            SILU=silu_and_mul,
            POW2=scale_format == "pow2",
            NATIVE=has_native_cast(x.device),
            num_warps=1 if rows <= _FEW_ROWS else 4,
        )
    return codes, scales

"""Triton kernels that quantize rows, or compute SiLU and product and quantize them at once.

:func:`silu_and_mul` is the activation alone; :mod:`fp8rl.kernels.norm` has the norm.

They read and write memory once instead of twice. The activation is computed in float32 and rounded
once to its dtype, as by :mod:`fp8rl.numerics.triton.swiglu` in the trainer: a value that only one
engine rounds in between would flip codes. Codes and scales equal those of
:func:`fp8rl.numerics.quantize_group` on the separate result, up to the last bit of ``exp``.

The scales of one group lie side by side in memory, which block-scaled GEMMs read in place. TMA
needs a multiple of 16 bytes between groups, so that rows are padded to a multiple of four.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.formats import FP8_DTYPE, GROUP
from fp8rl.numerics.triton.quantize import has_native_cast, quantize_groups
from fp8rl.numerics.triton.swiglu import swiglu
from fp8rl.recipe import ScaleFormat

_WIDTH = 1024  # columns of a row that one program of SwiGLU computes
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
    SILU: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    group = tl.program_id(1)
    column = group * GROUP + tl.arange(0, GROUP)
    inside = row < rows
    at = x_ptr + row[:, None] * stride_row + column[None, :]
    x = tl.load(at, inside[:, None], other=0.0)
    if SILU:
        up = tl.load(at + columns, inside[:, None], other=0.0)
        x = swiglu(x.to(tl.float32), up.to(tl.float32), NATIVE).to(x.dtype)
    codes, scale_inv = quantize_groups(x.to(tl.float32), POW2)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, inside[:, None])
    tl.store(scale_ptr + group * stride_scale + row, scale_inv, inside)


@triton.jit
def _swiglu_kernel(x_ptr, y_ptr, columns, stride_row, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    at = x_ptr + row * stride_row + column
    gate = tl.load(at, inside, other=0.0)
    up = tl.load(at + columns, inside, other=0.0)
    y = swiglu(gate.to(tl.float32), up.to(tl.float32), NATIVE).to(gate.dtype)
    tl.store(y_ptr + row * columns + column, y, inside)


def empty_rows(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes and scales for the rows of ``x``; symbolic shapes work too.

    Returns:
        codes ``[rows, columns]``; scale_inv float32 ``[columns / 128, rows padded to 4]``.

    Raises:
        UnsupportedError: ``columns`` is no multiple of 128.
    """
    if columns % GROUP:
        raise UnsupportedError(
            f"Fused quantization needs features in multiples of {GROUP}, not {columns}; pin the "
            "layer to BF16."
        )
    rows = x.shape[0]
    codes = torch.empty((rows, columns), dtype=FP8_DTYPE, device=x.device)
    padded = (rows + 3) // 4 * 4
    scales = torch.empty((columns // GROUP, padded), dtype=torch.float32, device=x.device)
    return codes, scales


def quantize_rows(
    x: torch.Tensor, scale_format: ScaleFormat, *, silu_and_mul: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations in 1x128 groups, after ``silu(x[:, :K]) * x[:, K:]`` if asked.

    Args:
        x: ``[M, K]``, or ``[M, 2 K]`` with ``silu_and_mul``; bfloat16 or float16, rows contiguous.
        scale_format: ``fp32``, or ``pow2`` for power-of-two scales.

    Returns:
        codes ``[M, K]``; scale_inv float32 ``[K / 128, M padded to 4]``.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape[0], x.shape[1] // 2 if silu_and_mul else x.shape[1]
    codes, scales = empty_rows(x, columns)
    if rows:
        tile = 8 if rows <= _FEW_ROWS else 32
        _rows_kernel[(triton.cdiv(rows, tile), columns // GROUP)](
            x,
            codes.view(torch.uint8),
            scales,
            rows,
            columns,
            x.stride(0),
            scales.stride(0),
            TILE=tile,
            GROUP=GROUP,
            SILU=silu_and_mul,
            POW2=scale_format == "pow2",
            NATIVE=has_native_cast(x.device),
            num_warps=1 if rows <= _FEW_ROWS else 4,
        )
    return codes, scales


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[:, :K]) * x[:, K:]``, computed in float32 and rounded once.

    The values are those that :func:`quantize_rows` quantizes with ``silu_and_mul``.

    Args:
        x: ``[M, 2 K]``, bfloat16 or float16, rows contiguous.

    Returns:
        ``[M, K]``, of ``x``'s dtype.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, columns)
    if rows:
        _swiglu_kernel[(rows, triton.cdiv(columns, _WIDTH))](
            x, y, columns, x.stride(0), WIDTH=_WIDTH, NATIVE=has_native_cast(x.device)
        )
    return y

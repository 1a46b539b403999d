"""RMS norm, alone or quantized: a row's bits depend on neither other rows nor what is fused."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics.formats import GROUP
from fp8rl.numerics.triton.activations import empty_rows, quantize_rows
from fp8rl.numerics.triton.quantize import quantize_groups
from fp8rl.recipe import ScaleFormat


def norm_tile(columns: int) -> dict[str, int]:
    """Return the tile of a program, which alone decides the order of a row's sum.

    A thread loads and adds up 8 neighbours of 16 bits, whatever else the kernel stores: in short
    rows because there are 8 for each, in longer ones because codes are stored in another shape
    (Triton would widen loads to 16 neighbours beside a store of bytes of the same shape).
    """
    width = triton.next_power_of_2(columns)
    if width <= 256:
        return {"ROWS": 1024 // width, "WIDTH": width, "num_warps": 4}
    return {"ROWS": 1, "WIDTH": width, "num_warps": min(max(width // 512, 1), 8)}


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy if Triton would not load 8 neighbours of its rows at once."""
    *apart, within = x.stride()
    if within == 1 and not any(number % 16 for number in (x.data_ptr(), *apart)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@triton.jit
def row_scale(x, columns, epsilon):
    """What normalizes each row of float32 ``[ROWS, WIDTH]``, a :func:`norm_tile`."""
    return tl.rsqrt(tl.sum(x * x, 1) / columns + epsilon)


# Batches have any number of rows: one kernel serves all, so that none is compiled in a step.
@triton.jit(do_not_specialize=["rows", "stride_scale"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    scale_ptr,
    root_ptr,
    rows,
    columns,
    stride_row,
    stride_scale,
    epsilon,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    ADD: tl.constexpr,
    QUANTIZE: tl.constexpr,
    POW2: tl.constexpr,
    KEEP: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (column < columns)
    loaded = tl.load(x_ptr + row * stride_row + column, inside, other=0.0)
    x = loaded.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
        total = x.to(loaded.dtype)
        tl.store(sum_ptr + row * columns + column, total, inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, column < columns, other=0.0).to(tl.float32)
    root = row_scale(x, columns, epsilon)[:, None]
    y = (x * root * weight).to(loaded.dtype)
    if KEEP:
        tl.store(root_ptr + row, root, row < rows)
    if QUANTIZE:
        index = tl.arange(0, ROWS * WIDTH // GROUP)
        row_of = first + index // (WIDTH // GROUP)
        group = index % (WIDTH // GROUP)
        there = (row_of < rows) & (group * GROUP < columns)
        stride_codes = columns
        if not WHOLE:
            stride_codes = tl.cdiv(columns, GROUP) * GROUP
            y = tl.where(column < columns, y, 0.0)  # NaN in a row with a NaN
        codes, scale_inv = quantize_groups(
            tl.reshape(y, [ROWS * WIDTH // GROUP, GROUP]).to(tl.float32), POW2
        )
        at = (row_of * stride_codes + group * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
        tl.store(y_ptr + at, codes, there[:, None])
        tl.store(scale_ptr + group * stride_scale + row_of, scale_inv, there)
    else:
        tl.store(y_ptr + row * columns + column, y, inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2) + epsilon) * weight`` over the last dimension.

    Computed in float32 and rounded once.

    Args:
        x: ``[.., columns]``, bfloat16 or float16 on a GPU.
        weight: ``[columns]``.
        epsilon: as in the model's config.
    """
    y = x.new_empty(x.shape)
    _launch(x, None, weight, epsilon, y)
    return y


def rms_norm_and_roots(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`rms_norm` and what it multiplies rows with, float32 ``[.., 1]``.

    A backward pass needs these, such as ``torch.ops.aten._fused_rms_norm_backward``.
    """
    y, roots = x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _launch(x, None, weight, epsilon, y, roots=roots)
    return y, roots


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, a sum that is rounded first, and this sum."""
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, epsilon, y, total=total)
    return y, total


def rms_norm_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    scale_format: ScaleFormat,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize what :func:`rms_norm` or :func:`add_rms_norm` returns, in 1x128 groups.

    Args:
        x: ``[M, K]``, bfloat16 or float16.
        residual: tensor of ``x``'s shape and dtype, or None.
        weight, epsilon: see :func:`rms_norm`.
        scale_format: of the codes.

    Returns:
        codes ``[M, K padded to 128]``, zeros behind K; scale_inv float32 ``[ceil(K / 128), M padded
        to 4]``; ``x + residual`` or None.
    """
    total = None if residual is None else x.new_empty(x.shape)
    if x.shape[1] < GROUP:  # the tile of such a norm is narrower than a group
        normed = x.new_empty(x.shape)
        _launch(x, residual, weight, epsilon, normed, total=total)
        return *quantize_rows(normed, scale_format), total
    codes, scales = empty_rows(x, x.shape[1])
    y = codes.view(torch.uint8)
    _launch(x, residual, weight, epsilon, y, total=total, scales=scales, form=scale_format)
    return codes, scales, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    y: torch.Tensor,
    *,
    total: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    roots: torch.Tensor | None = None,
    form: ScaleFormat = "fp32",
) -> None:
    columns = x.shape[-1]
    flat = x.reshape(-1, columns)
    tile = norm_tile(columns)
    if not x.numel():
        return
    flat = aligned(flat)
    _norm_kernel[(triton.cdiv(len(flat), tile["ROWS"]),)](
        flat,
        flat if residual is None else residual.contiguous(),
        weight,
        y,
        y if total is None else total,
        y if scales is None else scales,
        y if roots is None else roots,
        len(flat),
        columns,
        flat.stride(0),
        0 if scales is None else scales.stride(0),
        epsilon,
        GROUP=GROUP,
        WHOLE=columns % GROUP == 0,
        ADD=residual is not None,
        QUANTIZE=scales is not None,
        POW2=form == "pow2",
        KEEP=roots is not None,
        enable_fp_fusion=False,
        **tile,
    )

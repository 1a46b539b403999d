"""RMS norm whose result for a row does not depend on the other rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    columns,
    epsilon,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, WIDTH)
    inside = column < columns
    loaded = tl.load(x_ptr + row + column, inside, other=0.0)
    x = loaded.to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + column, inside, other=0.0).to(tl.float32)
        rounded = x.to(loaded.dtype)
        tl.store(sum_ptr + row + column, rounded, inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / columns + epsilon)
    weight = tl.load(weight_ptr + column, inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + column, (x * scale * weight).to(loaded.dtype), inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2) + epsilon) * weight`` over the last dimension.

    Computed in float32 and rounded once.

    Args:
        x: ``[.., columns]``, bfloat16 on a GPU.
        weight: ``[columns]``.
        epsilon: as in the model's config.
    """
    return _normalized(x, None, weight, epsilon)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of ``x + residual``, a sum that is rounded first, and this sum."""
    return _normalized(x, residual, weight, epsilon)


def _normalized(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    columns = x.shape[-1]
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    rows = x.numel() // columns
    if rows:
        width = triton.next_power_of_2(columns)
        _norm_kernel[(rows,)](
            x,
            x if residual is None else residual.contiguous(),
            weight,
            y,
            total,
            columns,
            epsilon,
            WIDTH=width,
            ADD=residual is not None,
            num_warps=min(max(width // 512, 1), 8),  # a row's bits follow from its width alone
            enable_fp_fusion=False,
        )
    return y, total

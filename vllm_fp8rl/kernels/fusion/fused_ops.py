"""The fused quantization kernels as custom operations, which torch.compile can trace.

None of them mutates its inputs. Codes are ``[rows, columns padded to 128]``, scales ``[groups, rows
padded to 4]``, see :mod:`fp8rl.numerics.triton.activations`.
"""

from __future__ import annotations

import torch

from fp8rl.kernels.norm import rms_norm_quantize
from fp8rl.numerics.triton.activations import empty_rows, quantize_rows
from fp8rl.recipe import ScaleFormat

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _format(pow2: bool) -> ScaleFormat:
    return "pow2" if pow2 else "fp32"


@torch.library.custom_op("fp8rl::quantize", mutates_args=(), device_types="cuda")
def quantize(x: torch.Tensor, pow2: bool) -> Pair:
    """Quantize ``x`` ``[M, K]`` to codes and scales."""
    return quantize_rows(x, _format(pow2))


@quantize.register_fake
def _(x: torch.Tensor, pow2: bool) -> Pair:
    return empty_rows(x, x.shape[1])


@torch.library.custom_op("fp8rl::silu_mul_quantize", mutates_args=(), device_types="cuda")
def silu_mul_quantize(x: torch.Tensor, pow2: bool) -> Pair:
    """Quantize ``silu(x[:, :K]) * x[:, K:]`` for ``x`` ``[M, 2 K]``."""
    return quantize_rows(x, _format(pow2), silu_and_mul=True)


@silu_mul_quantize.register_fake
def _(x: torch.Tensor, pow2: bool) -> Pair:
    return empty_rows(x, x.shape[1] // 2)


@torch.library.custom_op("fp8rl::rms_norm_quantize", mutates_args=(), device_types="cuda")
def norm_quantize(x: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool) -> Pair:
    """Quantize ``rms_norm(x) * weight``."""
    codes, scales, _ = rms_norm_quantize(x, None, weight, epsilon, _format(pow2))
    return codes, scales


@norm_quantize.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool) -> Pair:
    return empty_rows(x, x.shape[1])


@torch.library.custom_op("fp8rl::add_rms_norm_quantize", mutates_args=(), device_types="cuda")
def add_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool
) -> Triple:
    """Quantize ``rms_norm(x + residual) * weight``; return ``x + residual`` as well."""
    codes, scales, total = rms_norm_quantize(x, residual, weight, epsilon, _format(pow2))
    assert total is not None
    return codes, scales, total


@add_norm_quantize.register_fake
def _(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool
) -> Triple:
    return *empty_rows(x, x.shape[1]), x.new_empty(x.shape)  # contiguous, like the kernel's

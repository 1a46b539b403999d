"""The fused quantization kernels as operations, which torch.compile can trace.

None of them mutates its inputs. Codes have the shape of the quantized matrix, scales ``[groups,
rows padded to 4]``, see :mod:`fp8rl.numerics.triton.activations`.
"""

from __future__ import annotations

import torch

from fp8rl.numerics.triton.activations import empty_rows, quantize_rows, rms_norm_quantize
from fp8rl.recipe import ScaleFormat
from vllm_fp8rl.kernels.library import register

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _format(pow2: bool) -> ScaleFormat:
    return "pow2" if pow2 else "fp32"


@register("quantize", lambda x, pow2: empty_rows(x, x.shape[1]))
def quantize(x: torch.Tensor, pow2: bool) -> Pair:
    """Quantize ``x`` ``[M, K]`` to codes and scales."""
    return quantize_rows(x, _format(pow2))


@register("silu_mul_quantize", lambda x, pow2: empty_rows(x, x.shape[1] // 2))
def silu_mul_quantize(x: torch.Tensor, pow2: bool) -> Pair:
    """Quantize ``silu(x[:, :K]) * x[:, K:]`` for ``x`` ``[M, 2 K]``."""
    return quantize_rows(x, _format(pow2), silu_and_mul=True)


@register("rms_norm_quantize", lambda x, weight, epsilon, pow2: empty_rows(x, x.shape[1]))
def norm_quantize(x: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool) -> Pair:
    """Quantize ``rms_norm(x) * weight``."""
    codes, scales, _ = rms_norm_quantize(x, None, weight, epsilon, _format(pow2))
    return codes, scales


def _add_norm_quantize_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool
) -> Triple:
    return *empty_rows(x, x.shape[1]), x.new_empty(x.shape)  # contiguous, like the kernel's


@register("add_rms_norm_quantize", _add_norm_quantize_fake)
def add_norm_quantize(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float, pow2: bool
) -> Triple:
    """Quantize ``rms_norm(x + residual) * weight``; return ``x + residual`` as well."""
    codes, scales, total = rms_norm_quantize(x, residual, weight, epsilon, _format(pow2))
    assert total is not None
    return codes, scales, total

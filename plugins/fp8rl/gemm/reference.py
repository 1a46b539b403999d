"""Dequantize, then multiply in float32: exact to float32 rounding, on any device."""

from __future__ import annotations

import torch

from fp8rl.gemm.backend import GemmShape
from fp8rl.numerics import Quantized, dequantize_block, dequantize_group
from fp8rl.recipe import ScaleFormat


class ReferenceBackend:
    """The CPU backend, and the truth that other backends are tested against."""

    name = "reference"

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        return None

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return (dequantize_group(*x) @ dequantize_block(*w).t()).to(dtype)

    def dgrad(self, grad: Quantized, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        w = dequantize_block(w_t.codes.t(), w_t.scale_inv.t())
        return (dequantize_group(*grad) @ w).to(dtype)

    def wgrad(
        self,
        grad_t: Quantized,
        x_t: Quantized,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        product = (dequantize_group(*grad_t) @ dequantize_group(*x_t).t()).to(dtype)
        return product if out is None else out.add_(product)

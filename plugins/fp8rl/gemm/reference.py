"""Dequantize, then multiply in float32: exact to float32 rounding, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8rl.gemm.backend import GemmShape, GroupedShape
from fp8rl.numerics import (
    GroupedColumns,
    GroupedRows,
    Quantized,
    dequantize_block,
    dequantize_group,
)
from fp8rl.recipe import ScaleFormat

_FEWEST = 16
"""MKL multiplies fewer rows than this with kernels that add in another order, where it has AVX-512;
with AVX2 alone it does so with fewer than four."""


def multiply_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return ``x @ w.T``, in which a row does not depend on the number of rows beside it.

    So a decode step and a training step compute the same bits, where MKL multiplies, and for sums
    in float64 that are rounded to 16 bits everywhere.

    Args:
        x: float32 or float64 ``[M, K]``.
        w: like ``x``, ``[N, K]``.
    """
    missing = _FEWEST - len(x)
    if missing <= 0:
        return _matmul(x, w.t())
    return _matmul(torch.nn.functional.pad(x, (0, 0, 0, missing)), w.t())[: len(x)]


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply in the dtype of ``a``, also where autocast would take another."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class ReferenceBackend:
    """The CPU's backend. It multiplies the experts of a module one after the other."""

    name = "reference"
    _sums = torch.float32
    """Dtype of the forward product."""

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        return None

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        rows, weight = dequantize_group(*x), dequantize_block(*w)
        return multiply_rows(rows.to(self._sums), weight.to(self._sums)).to(dtype)

    def dgrad(self, grad: Quantized, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        w = dequantize_block(w_t.codes.t(), w_t.scale_inv.t())
        return _matmul(dequantize_group(*grad), w).to(dtype)

    def wgrad(
        self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = _matmul(dequantize_group(*grad_t), dequantize_group(*x_t).t()).to(dtype)
        return product if out is None else out.add_(product)

    def supports_grouped(
        self, device: torch.device, shape: GroupedShape, scale_format: ScaleFormat
    ) -> str | None:
        # A subclass may refuse single products, and experts are multiplied one by one.
        for tokens in sorted(set(shape.sizes) - {0}):
            single = GemmShape(tokens, shape.out_features, shape.in_features, shape.dtype)
            reason = self.supports(device, single, scale_format)
            if reason is not None:
                return reason
        return None

    def grouped_fprop(self, x: GroupedRows, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return _each_expert(self.fprop, x, w, dtype)

    def grouped_dgrad(self, grad: GroupedRows, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return _each_expert(self.dgrad, grad, w_t, dtype)

    def grouped_wgrad(
        self,
        grad_t: GroupedColumns,
        x_t: GroupedColumns,
        dtype: torch.dtype,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        positions = range(len(x_t.expert_rows.order))
        totals = [None] * len(positions) if out is None else out
        return [self.wgrad(grad_t.at(i), x_t.at(i), dtype, totals[i]) for i in positions]


class Float64Backend(ReferenceBackend):
    """The CPU's backend with ``exact``: no order of sums shows in a result of 16 bits."""

    _sums = torch.float64


def _each_expert(
    product: Callable[[Quantized, Quantized, torch.dtype], torch.Tensor],
    a: GroupedRows,
    w: Quantized,
    dtype: torch.dtype,
) -> torch.Tensor:
    experts = range(len(a.expert_rows.sizes))
    weights = [Quantized(w.codes[i], w.scale_inv[i]) for i in experts]
    return torch.cat([product(a.of(i), weights[i], dtype) for i in experts])

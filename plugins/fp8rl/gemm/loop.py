"""Experts one after the other, through the plain products of any backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8rl.gemm.backend import GemmBackend, GemmShape, GroupedShape
from fp8rl.numerics import GroupedColumns, GroupedRows, Quantized
from fp8rl.recipe import ScaleFormat


class LoopBackend:
    """A :class:`GroupedBackend` made of a plain one, whose name it has with `` loop`` after it."""

    def __init__(self, plain: GemmBackend) -> None:
        self.plain = plain
        self.name = f"{plain.name} loop"

    def supports_grouped(
        self, device: torch.device, shape: GroupedShape, scale_format: ScaleFormat
    ) -> str | None:
        for tokens in set(shape.sizes) - {0}:
            alone = GemmShape(tokens, shape.out_features, shape.in_features, shape.dtype)
            reason = self.plain.supports(device, alone, scale_format)
            if reason is not None:
                return reason
        return None

    def grouped_fprop(self, x: GroupedRows, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return _each(self.plain.fprop, x, w, dtype)

    def grouped_dgrad(self, grad: GroupedRows, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return _each(self.plain.dgrad, grad, w_t, dtype)

    def grouped_wgrad(
        self,
        grad_t: GroupedColumns,
        x_t: GroupedColumns,
        dtype: torch.dtype,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        results = []
        for position, tokens in enumerate(x_t.expert_rows.column_sizes):
            total = None if out is None else out[position]
            if tokens:
                a, b = grad_t.at(position), x_t.at(position)
                results.append(self.plain.wgrad(a, b, dtype, total))
            else:
                shape = (grad_t.scale_inv.shape[1], x_t.scale_inv.shape[1])
                results.append(
                    x_t.scale_inv.new_zeros(shape, dtype=dtype) if total is None else total
                )
        return results


def _each(
    product: Callable[[Quantized, Quantized, torch.dtype], torch.Tensor],
    a: GroupedRows,
    w: Quantized,
    dtype: torch.dtype,
) -> torch.Tensor:
    parts = [
        product(a.of(expert), Quantized(w.codes[expert], w.scale_inv[expert]), dtype)
        for expert, tokens in enumerate(a.expert_rows.sizes)
        if tokens
    ]
    if not parts:
        return a.scale_inv.new_empty(0, w.codes.shape[1], dtype=dtype)
    return torch.cat(parts)

"""What a GEMM backend is."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from fp8rl.numerics import Quantized
from fp8rl.recipe import ScaleFormat


class GemmShape(NamedTuple):
    """``tokens x out_features x in_features`` of one linear layer on this rank."""

    tokens: int
    out_features: int
    in_features: int


@runtime_checkable
class GemmBackend(Protocol):
    """The three products of a linear layer ``y = x @ w.T`` over quantized operands.

    ``x``: groups along ``in_features``; ``w``: 128x128 blocks of ``[out, in]``; ``grad`` in dgrad:
    groups along ``out_features``; the operands of wgrad: groups along *tokens*, so both come
    transposed (``[out, tokens]`` and ``[in, tokens]``).
    """

    name: str

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        """None if the backend serves the case, otherwise the reason why not."""

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, in] x [out, in] -> [tokens, out]`` in ``dtype``, accumulated in float32."""

    def dgrad(self, grad: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, out] x [out, in] -> [tokens, in]`` in ``dtype``, accumulated in float32."""

    def wgrad(self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """``[out, tokens] x [in, tokens] -> [out, in]`` in ``dtype``, accumulated in float32."""

"""What a GEMM backend is."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from fp8rl.numerics import Quantized
from fp8rl.recipe import ScaleFormat

Direction = Literal["fprop", "dgrad", "wgrad", "wgrad_add"]
"""The products of a linear layer; ``wgrad_add`` is wgrad added to a float32 ``main_grad``."""


class GemmShape(NamedTuple):
    """``tokens x out_features x in_features`` of one linear layer on this rank."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    """Of activations and their gradients: what fprop and dgrad return."""


@runtime_checkable
class GemmBackend(Protocol):
    """The three products of a linear layer ``y = x @ w.T`` over quantized operands.

    Each is ``a @ b.T`` with both operands K-major (the dimension that is summed over is last), as
    ``quantize_operand`` and ``quantize_weight`` give them:

    - ``x``: rowwise, groups along ``in_features``; ``w``: rowwise, 128x128 blocks of ``[out, in]``;
    - ``grad``: rowwise, groups along ``out_features``; ``w_t``: the weight's columnwise side,
      ``[in, out]``;
    - ``grad_t``, ``x_t``: columnwise, groups along *tokens*, perhaps padded with zero codes.

    On a GPU codes are contiguous; scales, and anything on a CPU, may have any strides.
    """

    name: str

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        """None if the backend serves the case, otherwise the reason why not."""

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, in] x [out, in] -> [tokens, out]`` in ``dtype``, accumulated in float32."""

    def dgrad(self, grad: Quantized, w_t: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """``[tokens, out] x [in, out] -> [tokens, in]`` in ``dtype``, accumulated in float32."""

    def wgrad(
        self,
        grad_t: Quantized,
        x_t: Quantized,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[out, tokens] x [in, tokens] -> [out, in]`` in ``dtype``, accumulated in float32.

        With ``out``, a tensor of the result's shape and dtype, the product is added to it and
        ``out`` is returned.
        """

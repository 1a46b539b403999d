"""The contract of a GEMM backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch

from fp8rl.numerics import GroupedColumns, GroupedRows, Quantized
from fp8rl.recipe import ScaleFormat

Direction = Literal["fprop", "dgrad", "wgrad", "wgrad_add"]
"""The products of a linear layer; ``wgrad_add`` is wgrad added to a float32 ``main_grad``."""


class GemmShape(NamedTuple):
    """The product ``tokens x out_features x in_features`` of one linear layer on this rank."""

    tokens: int
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    """Dtype of activations and their gradients, which fprop and dgrad return."""


class GroupedShape(NamedTuple):
    """The linear layers of this rank's experts: one shape, each over its own tokens."""

    sizes: tuple[int, ...]
    """Tokens of each expert, 0 allowed; operands lie as :class:`fp8rl.numerics.ExpertRows` says."""
    out_features: int
    in_features: int
    dtype: torch.dtype = torch.bfloat16
    """As in :class:`GemmShape`."""

    @property
    def tokens(self) -> int:
        """Tokens of all experts."""
        return sum(self.sizes)


@runtime_checkable
class GemmBackend(Protocol):
    """The three products of a linear layer ``y = x @ w.T`` over quantized operands.

    Each product is ``a @ b.T`` with both operands K-major (the dimension that is summed over is
    last), as ``quantize_operand`` and ``quantize_weight`` give them:

    - ``x``: rowwise, groups along ``in_features``; ``w``: rowwise, 128x128 blocks of ``[out, in]``;
    - ``grad``: rowwise, groups along ``out_features``; ``w_t``: the weight's columnwise side,
      ``[in, out]``;
    - ``grad_t``, ``x_t``: columnwise, groups along *tokens*, possibly padded with zero codes.

    On a GPU codes are contiguous, and zeros fill the last group of each row, so that the dimension
    that is summed over is a multiple of 128; scales, and everything on a CPU, may have any strides.
    """

    name: str

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        """Return None if the backend serves the case, otherwise the reason why not."""

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype, /) -> torch.Tensor:
        """``[tokens, in] x [out, in] -> [tokens, out]`` in ``dtype``, accumulated in float32."""

    def dgrad(self, grad: Quantized, w_t: Quantized, dtype: torch.dtype, /) -> torch.Tensor:
        """``[tokens, out] x [in, out] -> [tokens, in]`` in ``dtype``, accumulated in float32."""

    def wgrad(
        self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``[out, tokens] x [in, tokens] -> [out, in]`` in ``dtype``, accumulated in float32.

        With ``out``, a tensor of the result's shape and dtype, the product is added to it and
        ``out`` is returned.
        """


@runtime_checkable
class GroupedBackend(Protocol):
    """The products of :class:`GemmBackend` for all experts of a rank in one call.

    A :class:`GemmBackend` may have these methods too; one without them does not serve grouped
    experts. Weights are stacks: codes ``[experts, ...]`` and scale_inv likewise, contiguous on a
    GPU.
    """

    name: str

    def supports_grouped(
        self, device: torch.device, shape: GroupedShape, scale_format: ScaleFormat
    ) -> str | None:
        """Return None if the backend serves the case, otherwise the reason why not."""

    def grouped_fprop(self, x: GroupedRows, w: Quantized, dtype: torch.dtype, /) -> torch.Tensor:
        """``[expert_rows.tokens, out]``: ``[tokens, in] x [out, in]`` of each expert."""

    def grouped_dgrad(
        self, grad: GroupedRows, w_t: Quantized, dtype: torch.dtype, /
    ) -> torch.Tensor:
        """``[expert_rows.tokens, in]``: ``[tokens, out] x [in, out]`` of each expert."""

    def grouped_wgrad(
        self,
        grad_t: GroupedColumns,
        x_t: GroupedColumns,
        dtype: torch.dtype,
        out: Sequence[torch.Tensor] | None = None,
    ) -> Sequence[torch.Tensor]:
        """``[out, tokens] x [in, tokens] -> [out, in]`` of the expert at each position.

        With ``out``, tensors of the results' shape and dtype, the products are added to them.
        The product of an expert without tokens is zero.
        """

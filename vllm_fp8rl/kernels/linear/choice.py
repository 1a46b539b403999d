"""Which kernel multiplies a layer's activations with its FP8 weight.

:func:`select_kernel` decides once, when a layer is built. If no kernel serves the layer it raises;
there is never a silent fallback.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.gemm.reference import multiply_rows
from fp8rl.numerics import Quantized, dequantize_block, dequantize_group, quantize_group
from fp8rl.recipe import Recipe

if TYPE_CHECKING:
    from vllm_fp8rl.kernels.linear.block_gemm import DelegatedKernel

CPU_CACHE_ENV = "FP8RL_CPU_WEIGHT_CACHE"
"""``1`` (default) keeps a float32 copy of each FP8 weight on a CPU, which makes decoding faster and
takes 5 more bytes per element; ``0`` dequantizes the weight at each call."""


class CpuKernel:
    """Quantize, dequantize and multiply in float32, or in float64 where the recipe says ``exact``;
    the result is the trainer's, of ``ReferenceBackend.fprop``.

    A dequantized weight that is kept between calls is never outdated, whoever writes to the
    parameters: each call compares the live codes and scales bit by bit with those that it was made
    from. The comparison reads 2 bytes per element, the GEMM 4.
    """

    backend = "cpu"
    """Name in reports; kernels of vLLM's have a value of ``linear_backend`` here."""

    @staticmethod
    def stored_columns(columns: int) -> int:
        """Return the columns of the codes that a weight of ``columns`` is stored in."""
        return columns

    def __init__(self, recipe: Recipe, *, keep: bool) -> None:
        self._format = recipe.activations.scale_format
        self._sums = torch.float64 if recipe.exact else torch.float32
        self._keep = keep
        self._source: Quantized | None = None
        self._weight: torch.Tensor | None = None

    def apply(self, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
        """Multiply ``x`` ``[..., K]`` and return ``[..., N]`` in ``x``'s dtype."""
        rows = quantize_group(x.reshape(-1, x.shape[-1]), scale_format=self._format)
        y = multiply_rows(dequantize_group(*rows).to(self._sums), self._dequantized(weight))
        return y.to(x.dtype).view(*x.shape[:-1], weight.codes.shape[0])

    def _dequantized(self, weight: Quantized) -> torch.Tensor:
        if not self._keep:
            return dequantize_block(*weight).to(self._sums)
        if self._weight is None or not _identical(weight, self._source):
            self._weight = None  # freed first, so that there is one copy at a time
            self._source = Quantized(weight.codes.clone(), weight.scale_inv.clone())
            self._weight = dequantize_block(*weight).to(self._sums)
        return self._weight


def _identical(a: Quantized, b: Quantized | None) -> bool:
    return b is not None and all(torch.equal(_bits(x), _bits(y)) for x, y in zip(a, b, strict=True))


def _bits(x: torch.Tensor) -> torch.Tensor:
    flat = x.view(torch.uint8).view(-1)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 else flat


def select_kernel(
    device: torch.device, shape: GemmShape, recipe: Recipe, dtype: torch.dtype
) -> CpuKernel | DelegatedKernel:
    """Return the kernel of one layer on one rank, or raise UnsupportedError with the reasons."""
    if shape.in_features < 1 or shape.out_features < 1:
        raise UnsupportedError(
            f"An FP8 weight of shape [{shape.out_features}, {shape.in_features}] is empty; lower "
            "the tensor parallel size."
        )
    if device.type == "cuda":
        from vllm_fp8rl.kernels.linear.block_gemm import delegate

        return delegate(shape, recipe, dtype)
    if device.type != "cpu":
        raise UnsupportedError(
            f"vllm_fp8rl has no FP8 kernel for device '{device}', only for cuda and cpu; use "
            "recipe.rollout=false there."
        )
    cached = os.environ.get(CPU_CACHE_ENV, "1")
    if cached not in ("0", "1"):
        raise UnsupportedError(f"{CPU_CACHE_ENV}='{cached}' has no meaning; set it to 0 or 1.")
    return CpuKernel(recipe, keep=cached == "1")

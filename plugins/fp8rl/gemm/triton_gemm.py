"""Triton block GEMM: every shape, every GPU that multiplies E4M3 (Ada, Hopper and later)."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from fp8rl.gemm.backend import GemmShape
from fp8rl.numerics import Quantized
from fp8rl.recipe import ScaleFormat


class TritonBackend:
    """The general fallback: it needs no alignment, ragged tiles are masked."""

    name = "triton"

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        if device.type != "cuda":
            return "needs a GPU"
        if find_spec("triton") is None:
            return "triton is not installed"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            return f"sm_{capability[0]}{capability[1]} has no E4M3 matrix product"
        return None

    def fprop(self, x: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        return _product(x, w, dtype, None, blocks=True)

    dgrad = fprop

    def wgrad(
        self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return _product(grad_t, x_t, dtype, out, blocks=False)


def _product(
    a: Quantized, b: Quantized, dtype: torch.dtype, out: torch.Tensor | None, *, blocks: bool
) -> torch.Tensor:
    from fp8rl.gemm import triton_kernels  # needs triton

    accumulate = out is not None
    if out is None:
        out = torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
    triton_kernels.block_scaled_mm(a, b, out, blocks=blocks, accumulate=accumulate)
    return out

"""torch's own block-scaled matrix product: cuBLASLt's FP8 kernels on Hopper."""

from __future__ import annotations

import torch

from fp8rl.gemm.backend import GemmShape
from fp8rl.numerics import Quantized
from fp8rl.recipe import ScaleFormat

_HOPPER = (9, 0)
_ROW = 16  # bytes; cuBLASLt wants every row of codes and every group of scales to start aligned


class ScaledMmBackend:
    """``torch.nn.functional.scaled_mm`` with 1x128 and 128x128 scales (cuBLAS 12.9 and later)."""

    name = "scaled_mm"

    def supports(
        self, device: torch.device, shape: GemmShape, scale_format: ScaleFormat
    ) -> str | None:
        if device.type != "cuda":
            return "needs a GPU"
        if not hasattr(torch.nn.functional, "scaled_mm"):
            return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm; use 2.11"
        capability = torch.cuda.get_device_capability(device)
        if capability != _HOPPER:
            return (
                f"cuBLASLt has 128-element blocks on Hopper alone, this GPU is sm_{capability[0]}"
                f"{capability[1]}"
            )
        if shape.out_features % _ROW or shape.in_features % _ROW:
            return f"needs multiples of {_ROW} out and in features"
        if not shape.tokens or shape.tokens % 4:
            return "needs a multiple of 4 tokens, for the alignment of the scales"
        return None

    def fprop(self, a: Quantized, w: Quantized, dtype: torch.dtype) -> torch.Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        return scaled_mm(
            a.codes,
            w.codes.t(),
            groups_outermost(a.scale_inv),
            ScalingType.BlockWise1x128,
            _padded(w.scale_inv).t(),
            ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )

    dgrad = fprop

    def wgrad(
        self, grad_t: Quantized, x_t: Quantized, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from torch.nn.functional import ScalingType, scaled_mm

        product = scaled_mm(
            grad_t.codes,
            x_t.codes.t(),
            groups_outermost(grad_t.scale_inv),
            ScalingType.BlockWise1x128,
            groups_outermost(x_t.scale_inv),
            ScalingType.BlockWise1x128,
            output_dtype=dtype,
        )
        return product if out is None else out.add_(product)


def groups_outermost(scale_inv: torch.Tensor) -> torch.Tensor:
    """Make ``[rows, groups]`` scales contiguous along rows; the Triton kernels write them so."""
    return scale_inv if scale_inv.stride(0) == 1 else scale_inv.t().contiguous().t()


def _padded(scale_inv: torch.Tensor) -> torch.Tensor:
    """Pad the rows of block scales to a multiple of 4, the stride that cuBLASLt expects."""
    missing = -scale_inv.shape[1] % 4
    return torch.nn.functional.pad(scale_inv, (0, missing)) if missing else scale_inv

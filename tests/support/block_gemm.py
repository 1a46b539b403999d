"""Stand-ins on a CPU for what vLLM's block-FP8 products need of a GPU."""

from __future__ import annotations

import torch

from fp8rl.numerics import quantize_group


def quantize(x: torch.Tensor, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.ops.fp8rl.quantize``, which needs Triton: scales ``[groups, rows padded to 4]``."""
    codes, scale_inv = quantize_group(x, scale_format="pow2" if pow2 else "fp32")
    padding = torch.full((-len(x) % 4, scale_inv.shape[1]), float("nan"))
    return codes, torch.cat((scale_inv, padding)).t().contiguous()

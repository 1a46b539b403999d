"""SwiGLU of engines that are not compiled, rounded as in compiled ones and in the trainer."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.activation import SiluAndMul

from fp8rl.numerics.triton.activations import silu_and_mul


class RoundedOnceSiluAndMul(SiluAndMul):
    """``silu(gate) * up`` in float32, rounded once; vLLM's kernel rounds ``silu(gate)`` too."""

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[.., K]`` for gate and up side by side in ``[.., 2 K]``."""
        return silu_and_mul(x.flatten(0, -2)).view(*x.shape[:-1], -1)

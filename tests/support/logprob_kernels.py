"""Stand-ins in plain torch for ``fp8rl.numerics.triton.logprobs``, since a CPU has no Triton.

The kernels themselves are compared with float64 in ``tests/gpu/test_triton_logprobs.py``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def kernels() -> ModuleType:
    """A module with the two functions of ``fp8rl.numerics.triton.logprobs``."""

    def row_sums(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = logits.float()
        most = x.amax(-1)
        here = (chosen >= 0) & (chosen < x.shape[-1])
        logit = x.gather(-1, chosen.where(here, 0)[..., None])[..., 0].where(here, 0.0)
        return most, (x - most[..., None]).exp().sum(-1), logit

    def logprob_gradient(
        logits: torch.Tensor,
        chosen: torch.Tensor,
        most: torch.Tensor,
        spread: torch.Tensor,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        is_chosen = torch.arange(logits.shape[-1]) == chosen[..., None]
        share = (logits.float() - most[..., None] - spread[..., None]).exp()
        return ((is_chosen.float() - share) * grad[..., None]).to(logits.dtype)

    module: Any = ModuleType("fp8rl.numerics.triton.logprobs")
    module.row_sums, module.logprob_gradient = row_sums, logprob_gradient
    return module

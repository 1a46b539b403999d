"""A stand-in in plain torch for the kernel of fused log-probabilities: a CPU has no Triton."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def kernels() -> ModuleType:
    """A module with the forward function of ``fp8rl.numerics.triton.logprobs``."""

    def row_sums(logits: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = logits.float()
        most = x.amax(-1)
        here = (chosen >= 0) & (chosen < x.shape[-1])
        logit = x.gather(-1, chosen.where(here, 0)[..., None])[..., 0].where(here, 0.0)
        return most, (x - most[..., None]).exp().sum(-1), logit

    module: Any = ModuleType("fp8rl.numerics.triton.logprobs")
    module.row_sums = row_sums
    return module

"""Stand-ins in plain torch for the kernels of log-probabilities, since a CPU has no Triton.

The kernels themselves are compared with float64 in ``tests/gpu/test_triton_logprobs.py`` and
``tests/gpu/test_exact.py``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch


def exact_kernels() -> ModuleType:
    """A module with the function of ``fp8rl.kernels.logprobs``."""

    def token_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        most, total, logit = kernels().row_sums(logits, ids)
        here = (ids >= 0) & (ids < logits.shape[-1])
        return (logit - most - total.log()).where(here, 0.0), most, total.log()

    module: Any = ModuleType("fp8rl.kernels.logprobs")
    module.token_logprobs = token_logprobs
    return module


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

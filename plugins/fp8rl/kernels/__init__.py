"""Kernels that rollout and trainer both call where the recipe says ``exact``.

The result for a token has the same bits whatever is computed beside it, and in both engines.
:mod:`fp8rl.kernels.paged` serves rollouts without ``exact`` too, in a faster arithmetic. In Triton
for a GPU, in torch for a CPU; an engine is never imported.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import reference
from fp8rl.models.pins import PinPolicy

REMEDY = "or set exact to false in the recipe."
"""End of a message that refuses what ``exact`` does not serve."""
EXACT_MODELS = ("llama", "qwen3", "qwen3_moe")
"""Model types whose layers have no place but those that both engines share."""
EXACT_RANKS = (1, 2)
"""Tensor parallel sizes, of which both engines have the same. The partial sums of two ranks are
added in one rounding, whichever comes first; those of more are added in an order that is the
library's."""


def implementation(x: torch.Tensor, kernels: str) -> ModuleType:
    """Return the module whose functions serve the device of ``x``; ``kernels`` is a GPU's."""
    return reference if x.is_cpu else import_module(f"fp8rl.kernels.{kernels}")


def require_served_ranks(what: str, ranks: int) -> None:
    """Raise UnsupportedError unless the option ``what`` is one of :data:`EXACT_RANKS`."""
    if ranks not in EXACT_RANKS:
        raise UnsupportedError(
            f"exact serves {what} {' or '.join(map(str, EXACT_RANKS))}, not {ranks}: the partial "
            "sums of more ranks have no order that both engines share; set the same size in "
            "trainer and rollout, or set exact to false in the recipe."
        )


def require_fp8_linears(policy: PinPolicy) -> None:
    """Raise UnsupportedError if a linear layer of the decoder is pinned to BF16."""
    for name in policy.bf16_linears():
        raise UnsupportedError(
            f"exact needs every linear layer of the decoder in FP8, and '{name}' is pinned to "
            "BF16, where products depend on the number of tokens beside; remove the pin "
            f"({policy.row(name).reason}), {REMEDY}"
        )

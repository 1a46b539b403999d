"""Kernels that rollout and trainer both call where the recipe says ``exact``.

The result for a token has the same bits whatever is computed beside it, and in both engines.
In Triton for a GPU, in torch for a CPU; an engine is never imported.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import reference
from fp8rl.models.pins import PinPolicy

EXACT_MODELS = ("llama", "qwen3", "qwen3_moe")
"""Model types whose layers have no place but those that both engines share."""


def implementation(x: torch.Tensor, kernels: str) -> ModuleType:
    """Return the module whose functions serve the device of ``x``.

    Args:
        x: a tensor on a GPU or a CPU.
        kernels: module of this package with the function to call, of which a CPU has another.
    """
    return reference if x.is_cpu else import_module(f"fp8rl.kernels.{kernels}")


def require_fp8_linears(policy: PinPolicy) -> None:
    """Raise UnsupportedError if a linear layer of the decoder is pinned to BF16."""
    for name in policy.bf16_linears():
        raise UnsupportedError(
            f"exact needs every linear layer of the decoder in FP8, and '{name}' is pinned to "
            "BF16, where products depend on the number of tokens beside; remove the pin "
            f"({policy.row(name).reason}), or set exact to false in the recipe."
        )

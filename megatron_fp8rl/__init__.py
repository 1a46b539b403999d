"""FP8 training in Megatron-Core: FP8 linears with pinned BF16 layers, swapped into a built model.

::

    conversion = convert(model, Recipe.load("recipe.yaml"))

Names are imported on first use, so that importing this package does not import megatron.core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_fp8rl.conversion import Conversion, conversion_of, convert

__all__ = ["Conversion", "conversion_of", "convert"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module("megatron_fp8rl.conversion"), name)

"""FP8 training of Hugging Face models in torch, also under FSDP2: FP8 linears with pinned BF16
layers, swapped into a built model.

::

    conversion = convert(model, Recipe.load("recipe.yaml"))

Names are imported on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fp8rl.conversion import Conversion, convert
    from torch_fp8rl.export import export_hf

__all__ = ["Conversion", "convert", "export_hf"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    module = "export" if name == "export_hf" else "conversion"
    return getattr(import_module(f"torch_fp8rl.{module}"), name)

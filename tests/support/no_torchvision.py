"""Import models that read images where torchvision is not installed.

vLLM's Qwen3.5 and Qwen3-VL import transformers' image processors, and those torchvision, whose
wheels on PyPI are for CUDA. Nothing of it is called for text.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


@contextmanager
def without_torchvision() -> Iterator[None]:
    """A region in which empty modules stand for torchvision, unless it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    # Asks once, and remembers that there is none: it would import more of it.
    importlib.import_module("transformers.models.qwen2_vl")
    for name in _NAMES:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    try:
        yield
    finally:
        for name in _NAMES:
            del sys.modules[name]

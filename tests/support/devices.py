"""Where tests of numerics run: the torch reference on the CPU, and Triton's kernels.

Kernels run on a GPU; with ``TRITON_INTERPRET=1`` and triton installed they run on the CPU instead,
in Triton's interpreter, on the software cast to E4M3.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch

from fp8rl.numerics import Quantized, reference

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_KERNELS = (torch.cuda.is_available() or INTERPRETED) and find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_KERNELS and not INTERPRETED else "cpu")
"""Of the kernels."""

needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="needs a CUDA GPU, or TRITON_INTERPRET=1, and triton"
)
needs_gpu = pytest.mark.skipif(
    not HAS_KERNELS or INTERPRETED, reason="needs a CUDA GPU, and triton"
)


@dataclass(frozen=True)
class Device:
    """One of the two implementations, and where its tensors are."""

    triton: bool

    @property
    def at(self) -> torch.device:
        return DEVICE if self.triton else torch.device("cpu")

    def module(self, kernels: str) -> ModuleType:
        """The reference, or this file of :mod:`fp8rl.numerics.triton`."""
        return import_module(f"fp8rl.numerics.triton.{kernels}") if self.triton else reference

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy with the strides of ``x``, at an address that is as aligned."""
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(self.at, copy=True)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())


DEVICES = [
    pytest.param(Device(False), id="reference"),
    pytest.param(Device(True), id="triton", marks=needs_kernels),
]


def assert_same(actual: Quantized | None, expected: Quantized | None) -> None:
    """The same to the bit, apart from zeros that may end a row of codes; or both are None."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    assert actual.codes.dtype == torch.float8_e4m3fn
    width = expected.codes.shape[-1]
    codes = actual.codes.cpu().contiguous().view(torch.uint8)
    assert not codes[..., width:].any()
    for got, want in (
        (codes[..., :width], expected.codes.cpu().contiguous().view(torch.uint8)),
        (bits(actual.scale_inv), bits(expected.scale_inv)),
    ):
        assert got.shape == want.shape
        differing = (got != want).sum().item()
        assert differing == 0, f"{differing} of {want.numel()} differ"


def bits(scales: torch.Tensor) -> torch.Tensor:
    assert scales.dtype == torch.float32
    return scales.cpu().contiguous().view(torch.int32)

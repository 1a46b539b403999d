"""Both implementations of the numerics, and memory in which a wrong write shows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from support.devices import DEVICES, Device

_GUARD = 1 << 20  # bytes behind each output


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """The torch reference on the CPU, then Triton's kernels where they run."""
    return request.param


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs and what is behind them start as 0xAA bytes; what is behind stays."""
    guards: list[torch.Tensor] = []
    empty = torch.empty

    def with_guard(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        bytes_ = math.prod(shape) * dtype.itemsize
        memory = empty(bytes_ + _GUARD, dtype=torch.uint8, device=device).fill_(0xAA)
        guards.append(memory[bytes_:])
        return memory[:bytes_].view(dtype).view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", with_guard)
        yield
    assert guards
    for guard in guards:
        assert (guard == 0xAA).all(), "written behind an output"

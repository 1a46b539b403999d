"""Tell whether a fused SwiGLU ran, and compare it with the separate operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from fp8rl.numerics import reference
from fp8rl.training import linear
from support.numeric import relative_error

FUSED = ("quantize_swiglu", "quantize_swiglu_grad")
Calls = list[tuple[str, torch.Size]]


def spy_on_swiglu(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return a list of each call of a fused function: its name, the shape of gate and up."""
    calls: Calls = []
    for name in FUSED:
        monkeypatch.setattr(linear, name, partial(_call, calls, name, getattr(linear, name)))
    return calls


def compare_with_separate(
    mlp: Any,
    x: torch.Tensor,
    grad: torch.Tensor,
    weights: Sequence[torch.nn.Parameter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare a fused MLP on a GPU with itself after ``give_back``: y, dx, weights' gradients."""

    def run() -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y, bias = mlp(leaf)
        assert bias is None
        y.backward(grad)
        made = [y.detach(), leaf.grad, *(weight.grad for weight in weights)]
        for weight in weights:
            weight.grad = None
        return made

    with monkeypatch.context() as patch:
        calls = spy_on_swiglu(patch)
        for name in ("swiglu", "swiglu_grad"):
            patch.delattr(reference, name)  # what computes the activation apart
        fused = run()
    assert [name for name, _ in calls] == list(FUSED)
    mlp.give_back()
    for got, expected in zip(fused, run(), strict=True):
        assert relative_error(got, expected) < 5e-3


def _call(calls: Calls, name: str, function: Any, *args: Any, **options: Any) -> Any:
    calls.append((name, args[-2].shape))
    return function(*args, **options)

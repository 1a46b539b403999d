"""Tell whether a fused SwiGLU ran, and let nothing else compute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from fp8rl.numerics import reference
from megatron_fp8rl import linear


@contextmanager
def fused_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yield the names of the fused functions that were called; their fallback is gone inside."""
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for name in ("quantize_swiglu", "quantize_swiglu_grad"):
            patch.setattr(linear, name, partial(_call, calls, name, getattr(linear, name)))
        for name in ("swiglu", "swiglu_grad"):
            patch.delattr(reference, name)
        yield calls


def _call(calls: list[str], name: str, function: Any, *args: Any, **options: Any) -> Any:
    calls.append(name)
    return function(*args, **options)

"""Compiles Triton kernels side by side: one after the other a file of tests waits for minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Within, launches run nothing: each starts to compile its kernel. After it all are at hand."""
    run = JITFunction.run

    def compile_only(kernel: JITFunction, *args: Any, warmup: bool, **options: Any) -> Any:
        return run(kernel, *args, warmup=True, **options)

    # Threads suffice: all but a tenth of a compilation runs without Python's lock.
    with (
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        triton.AsyncCompileMode(pool),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(JITFunction, "run", compile_only)
        yield

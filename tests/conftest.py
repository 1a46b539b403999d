"""Two processes share the tests (``make test``), by what a process can hold."""

from __future__ import annotations

import os
from pathlib import Path

# Two processes have a core each; and with more threads MKL sums a small product in another order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.register_assert_rewrite("support")
ENGINES = {Path(__file__).parent / name for name in ("vllm_fp8rl", "fuzz")}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests around live engines in this process in one, all others in the other.

    An engine's process groups end when a test of Megatron's ends its own, so the two must not mix.
    """
    for item in items:
        group = "engine" if ENGINES & set(item.path.parents) else "others"
        item.add_marker(pytest.mark.xdist_group(group))

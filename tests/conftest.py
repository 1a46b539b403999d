"""Two processes share the tests (``make test``), by what a process can hold."""

from __future__ import annotations

from pathlib import Path

import pytest

ENGINE = Path(__file__).parent / "vllm_fp8rl"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests around the one live engine of a session in one, all others in the other.

    An engine's process groups end when a test of Megatron's ends its own, so the two must not mix.
    """
    for item in items:
        group = "engine" if ENGINE in item.path.parents else "others"
        item.add_marker(pytest.mark.xdist_group(group))

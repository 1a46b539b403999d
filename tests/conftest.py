"""Two processes share the tests (``make test``), by what a process can hold."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# For the processes that tests start: the sitecustomize.py in there.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [
        str(Path(__file__).parent / "support" / "startup"),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
)
# Two processes have a core each; and with more threads MKL sums a small product in another order.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A model that no test has is not looked for in a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from hypothesis import settings

import support.startup.sitecustomize  # noqa: F401  this process has started without it

pytest.register_assert_rewrite("support")
# Other work on the cores takes an example past any deadline.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
TESTS = Path(__file__).parent
SLOW = {
    TESTS / "fuzz",
    TESTS / "fp8rl_bench" / "test_bench_run.py",
    TESTS / "fp8rl_demo" / "test_run.py",
    TESTS / "megatron_fp8rl" / "test_exact_replay.py",
}
ENGINES = {TESTS / name for name in ("vllm_fp8rl", "fuzz")}
# Long ones that need neither an engine nor Megatron in this process: they start others.
PROCESSES = {
    TESTS / "fp8rl_bench" / "test_bench_run.py",
    TESTS / "fp8rl_demo" / "test_run.py",
    TESTS / "nemo_rl_ext" / "patches" / "test_activation.py",
}


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests around live engines in this process in one group, small files of processes last."""
    for item in items:
        if item.path in PROCESSES:
            group = item.path.stem
        else:
            group = "engine" if ENGINES & set(item.path.parents) else "others"
        item.add_marker(pytest.mark.xdist_group(group))
        if SLOW & {item.path, *item.path.parents}:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """No test frees what was imported: tests that collect garbage need not look through it."""
    gc.freeze()

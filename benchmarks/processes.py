"""Run variants of a benchmark in processes of their own; tell whether others use the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

IDLE_MIB, IDLE_LOAD = 1024, 0.25
"""Memory in use of a GPU, and processes that want to run for each core, of a machine that does
nothing else."""


def in_process(variant: str, **environment: str) -> dict[str, Any]:
    """Run this script again with ``--child`` and ``--out``, for one variant.

    Args:
        variant: name of the variant.
        environment: variables to set for the process.

    Returns:
        The result that the process wrote; if it failed, with its exit status as ``failed`` and
        what it had written before.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--child", variant, "--out", str(out)]
        done = subprocess.run(command, env=os.environ | environment, check=False)
        if not done.returncode:
            return json.loads(out.read_text())
        found: dict[str, Any] = {"variant": variant}
        with suppress(FileNotFoundError, json.JSONDecodeError):  # nothing, or half of it
            found |= json.loads(out.read_text())
        return found | {"failed": done.returncode}


def save(found: object, out: Path, newest: dict[str, Any]) -> None:
    """Write what was found so far, and print the newest result."""
    out.write_text(json.dumps(found, indent=1))
    sys.stdout.write(json.dumps(newest) + "\n")
    sys.stdout.flush()


def host_loop() -> float:
    """Milliseconds that a hundred thousand rounds of Python take on this host at the moment."""
    began, total = time.perf_counter(), 0
    for number in range(100_000):
        total += number
    return (time.perf_counter() - began) * 1e3


def is_shared(patience: float = 20) -> bool:
    """Tell whether others use a GPU or the cores of this machine: then seconds are upper bounds."""
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

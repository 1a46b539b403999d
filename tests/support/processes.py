"""Scripts in processes of their own."""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Variables of a process that can import this checkout, ``support`` and what lies in folders.

    Args:
        folders: come first on the process's ``sys.path``.
        variables: change or complete those of this process.
    """
    root = TESTS.parent
    before = os.environ.get("PYTHONPATH")
    path = [*folders, TESTS, root, root / "plugins", *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}


def run_code(
    code: str,
    *arguments: object,
    timeout: float = 60.0,
    folders: tuple[Path, ...] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python code, indented or not, in a process of its own, whatever its exit code.

    Args:
        code: a program; or ``-m`` for the module that the first argument names.
        arguments: given to the program as strings.
        timeout: seconds.
        folders: further folders from which it imports.
        variables: environment variables that change.
    """
    program = [code] if code == "-m" else ["-c", textwrap.dedent(code)]
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(*folders, **variables),
        check=False,
    )


def run_script(
    script: Path,
    *arguments: object,
    timeout: float,
    folders: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a script in a process of its own and return the JSON of its last line of output.

    Args:
        script: file to run.
        arguments: given to the script as strings.
        timeout: seconds.
        folders: further folders from which the script imports.
        variables: environment variables that change.
    """
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(*folders, **(variables or {})),
        check=False,
    )
    return answer(done)


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The last JSON of the output; fails with what a process that failed wrote.

    vLLM may log a line more to stdout while its processes end.
    """
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1])


def fork_engines() -> None:
    """Let vLLM fork the processes of this process's engines, and let them wait without a core.

    vLLM's platform for CPUs always spawns them, and each imports vLLM again for 8 s of CPU time.
    Those of ``async_cases.py`` and of ``examples/vllm_push.py``, which test_frameworks.py runs as a
    user does, are spawned.

    Each process asks for messages without a pause for a second after the last one, before it
    sleeps until the next one comes: that second is cut short, for two cores have other work to do.
    """
    for name in ("engine.utils", "executor.multiproc_executor"):
        module: Any = importlib.import_module(f"vllm.v1.{name}")
        assert callable(module.get_mp_context)
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    queue: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    if hasattr(queue, "SpinCondition"):  # not in the oldest vLLM that we serve
        queue.SpinCondition.__init__ = functools.partialmethod(
            queue.SpinCondition.__init__, busy_loop_s=0.01
        )

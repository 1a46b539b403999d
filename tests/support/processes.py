"""Scripts in processes of their own."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any

from support.launch import RENDEZVOUS

TESTS = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Variables of a process that imports this checkout, ``support`` and ``folders`` first."""
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
    """Run Python code, or ``-m`` of a module, in a process of its own, whatever its exit code."""
    program = [code] if code == "-m" else ["-c", textwrap.dedent(code)]
    return _run([*program, *map(str, arguments)], timeout, environment(*folders, **variables))


def run_script(
    script: Path,
    *arguments: object,
    timeout: float,
    folders: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a script in a process of its own and return the JSON of its last line of output."""
    env = environment(*folders, **(variables or {}))
    return answer(_run([str(script), *map(str, arguments)], timeout, env))


def _run(
    program: list[str], timeout: float, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python's in a process of its own, whatever its exit code."""
    return subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        check=False,
    )


def run_forked(
    script: Path,
    *arguments: object,
    timeout: float,
    folders: tuple[Path, ...] = (),
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork of a process that has imported the engines, whatever its exit code.

    Imports are most of a process's time; a test of imports needs :func:`run_script`.
    """
    command = [str(script), *map(str, arguments)]
    (done,) = _forked(command, [environment(*folders, **variables)], timeout)
    return done


def run_ranks(
    script: Path,
    ranks: int,
    *arguments: object,
    timeout: float,
    folders: tuple[Path, ...] = (),
    **variables: str,
) -> list[str]:
    """As :func:`run_forked`, in several processes of one world, instead of ``launch``; stdouts."""
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="fp8rl-ranks-") as folder:
        shared = environment(*folders, **variables) | {
            "WORLD_SIZE": str(ranks),
            "GLOO_SOCKET_IFNAME": "lo",
            RENDEZVOUS: str(Path(folder, "store")),
        }
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        found = _forked(command, [shared | place for place in places], timeout)
    failed = [f"{done.returncode}: {done.stderr[-6000:]}" for done in found if done.returncode]
    assert not failed, "\n".join(failed)
    return [done.stdout for done in found]


def engines_imported() -> Any:
    """``multiprocessing`` whose processes are forked from one that has imported the engines.

    A process that is started here by itself has the environment that this one had at its first
    call, and not what a test has set since.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engines_imported"])  # in support/startup
    return context


def _forked(
    command: list[str], environments: list[dict[str, str]], timeout: float
) -> list[subprocess.CompletedProcess[str]]:
    """Fork a process for each environment and wait for all; one that fails ends the others."""
    context = engines_imported()
    with tempfile.TemporaryDirectory(prefix="fp8rl-forked-") as folder:
        started: list[tuple[Any, Path, Path]] = []
        for number, env in enumerate(environments):
            out, err = Path(folder, f"{number}.out"), Path(folder, f"{number}.err")
            process = context.Process(target=_run_as_script, args=(command, env, out, err))
            process.start()
            started.append((process, out, err))
        processes = [process for process, *_ in started]
        deadline = time.monotonic() + timeout
        try:
            while left := [each.sentinel for each in processes if each.is_alive()]:
                if any(each.exitcode for each in processes) or time.monotonic() > deadline:
                    break
                connection.wait(left, timeout=1.0)
        finally:
            for process in processes:
                process.kill()  # which those that have ended do not mind
                process.join()
        late = f"It did not end within {timeout:g} s." if time.monotonic() > deadline else ""
        return [
            subprocess.CompletedProcess(
                command, process.exitcode, out.read_text(), err.read_text() + late
            )
            for process, out, err in started
        ]


def _run_as_script(command: list[str], env: dict[str, str], out: Path, err: Path) -> None:
    """In a forked process: what ``python script arguments`` does."""
    for number, file in ((1, out), (2, err)):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:0] = [str(Path(command[0]).parent), *env["PYTHONPATH"].split(os.pathsep)]
    sys.argv[:] = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The last JSON of the output; fails with what a process that failed wrote."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return json.loads(lines[-1])


def fork_engines() -> None:
    """Let vLLM fork the processes of this process's engines, and let them wait without a core.

    CPU platforms spawn them, 8 s each, and they poll for a second after each message.
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

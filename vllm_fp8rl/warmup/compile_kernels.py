"""The process that compiles: ``python -m vllm_fp8rl.warmup.compile_kernels``.

It reads a :class:`Toolchain` as one line of JSON from stdin, then one :class:`Shape` per line until
stdin is closed, and answers with one line of JSON on stdout. DeepGEMM itself compiles a kernel when
it is first called, one after the other, about 2 s each; here nvcc runs on many cores at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from vllm_fp8rl.warmup.kernel_lists import CACHED, KernelSources, compiler_flags
from vllm_fp8rl.warmup.shapes import Shape, Toolchain

NVCC_SECONDS = 300
"""Longest time for one kernel, which takes about 2 s on an idle core."""


def compile_shapes(toolchain: Toolchain, shapes: Iterable[Shape]) -> int:
    """Compile the kernels of shapes as they arrive and return the number compiled.

    One process compiles into a cache at a time. Ranks mostly need the same kernels: those that wait
    find them compiled. No process holds the lock while it waits for its engine to build a layer.
    """
    compilers = compilers_at_once(len(os.sched_getaffinity(0)))
    compiled = 0
    sources: KernelSources | None = None
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(compilers) as pool:
        try:
            for batch in _batches(shapes):
                with _locked(Path(toolchain.cache) / "fp8rl"):
                    started: list[tuple[Shape, dict[str, Future[bool]]]] = []
                    for shape in batch:
                        if toolchain.is_compiled(shape):
                            continue
                        sources = sources or KernelSources(toolchain, Path(scratch))
                        listed = sources.kernels(shape)
                        kernels = {
                            at.name: pool.submit(compile_kernel, toolchain, at) for at in listed
                        }
                        started.append((shape, kernels))
                    for shape, kernels in started:
                        compiled += sum(kernel.result() for kernel in kernels.values())
                        _write_record(toolchain.record(shape), list(kernels))
        finally:  # after an error the others are of no use
            pool.shutdown(cancel_futures=True)
    return compiled


def compilers_at_once(cores: int) -> int:
    """Return how many compilers to run: half of the cores, or eight if that is more and they exist.

    The engine runs torch.compile at the same time, which took 1.4 and 2.7 s longer beside 16
    compilers of 16 cores than beside 8 (``docs/measurements/start.md``). With fewer than eight the
    kernels would not be there before the engine needs them.
    """
    return max(cores // 2, min(cores, 8))


def _batches(shapes: Iterable[Shape]) -> Iterator[list[Shape]]:
    """Yield the shapes that have arrived since the last batch, and wait where none has."""
    arrived: SimpleQueue[Shape | None] = SimpleQueue()

    def read() -> None:
        try:
            for shape in shapes:
                arrived.put(shape)
        finally:
            arrived.put(None)

    threading.Thread(target=read).start()
    more = True
    while more:
        batch = [arrived.get()]
        while not arrived.empty():
            batch.append(arrived.get())
        more = batch[-1] is not None
        yield [shape for shape in batch if shape is not None]


def compile_kernel(toolchain: Toolchain, listed: Path) -> bool:
    """Compile one listed kernel into the cache; return False if the cache already has it.

    Its folder appears by one rename, as DeepGEMM's own do.
    """
    if toolchain.has(listed.name):
        return False
    folder = Path(toolchain.cache) / "tmp" / f"fp8rl-{uuid.uuid4().hex}"
    try:
        # Its source, and from DeepGEMM 2.8 on also the mark that makes the entry valid.
        shutil.copytree(listed, folder, ignore=shutil.ignore_patterns(*CACHED))
        source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
        command = [toolchain.nvcc, str(source), "-cubin", "-o", str(cubin), *compiler_flags(listed)]
        _run_compiler(command, folder, listed.name)
        target = Path(toolchain.cache) / "cache" / listed.name
        target.parent.mkdir(exist_ok=True)
        try:
            folder.rename(target)
        except OSError:
            if not toolchain.has(listed.name):  # otherwise the engine compiled it in the meantime
                raise
        return True
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_compiler(command: list[str], folder: Path, kernel: str) -> None:
    """Run nvcc in a process group of its own, so that a time-out ends what it has started too."""
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as nvcc:
        try:
            _, errors = nvcc.communicate(timeout=NVCC_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(nvcc.pid, signal.SIGKILL)
            raise RuntimeError(
                f"{command[0]} did not finish {kernel} within {NVCC_SECONDS} s"
            ) from None
    if nvcc.returncode:
        raise RuntimeError(f"{command[0]} failed on {kernel}: {errors.strip()[-500:]}")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_record(path: Path, kernels: list[str]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(kernels))
    partial.rename(path)


@contextmanager
def _answer_stream() -> Iterator[IO[str]]:
    """Yield the real stdout, and send everything that libraries print to stderr instead."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        yield answer


def main() -> None:
    """Compile for one engine."""
    with _answer_stream() as answer:
        toolchain = Toolchain(**json.loads(sys.stdin.readline()))
        try:
            compiled = compile_shapes(toolchain, (Shape(*json.loads(line)) for line in sys.stdin))
        except Exception as error:  # the engine logs it, whatever it is
            json.dump({"compiled": 0, "error": f"{type(error).__name__}: {error}"}, answer)
        else:
            json.dump({"compiled": compiled, "error": None}, answer)


if __name__ == "__main__":
    main()

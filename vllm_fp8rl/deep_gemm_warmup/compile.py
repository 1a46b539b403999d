"""Compile DeepGEMM's kernels for given shapes ahead of use, in parallel: a program of its own.

DeepGEMM compiles a kernel when it is first met, one after the other, about 2 s each. Only its C++
heuristics know which kernels a weight needs, so they are asked: a compiler that leaves empty files
stands in for nvcc (``DG_JIT_NVCC_COMPILER``), a scratch folder for the cache
(``DG_JIT_CACHE_DIR``), and a product is called for every number of rows at which the choice can
change. Each call leaves the source of its kernel under the final name and then fails to load the
empty file: nothing runs, the tensors lie on the CPU and are never touched, and the GPU's context is
given back after a fraction of a second. The real nvcc then makes all of them, as many at once as
there are cores, into the real cache, where each folder appears by one rename, as DeepGEMM's own do.

Read with DeepGEMM 2.5.0 (vendored by vLLM 0.25.1): ``csrc/jit/compiler.hpp`` and
``csrc/jit_kernels/heuristics``. Run as a file, so that nothing but the standard library is imported
by a process that only waits for another one; :mod:`vllm_fp8rl.deep_gemm_warmup.start` starts it.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

_FORMAT = 1
_BLOCK = 128
_STUB = """#!/bin/sh
for argument in "$@"; do
  if [ "$argument" = --version ]; then exec "{nvcc}" "$@"; fi
done
for argument in "$@"; do
  if [ "$previous" = -o ]; then : > "$argument"; output="$argument"; fi
  previous="$argument"
done
printf '%s\\n' "$@" > "$output.arguments"
"""
_ARGUMENTS = "kernel.cubin.arguments"
NO_NVCC = "there is no nvcc; install the CUDA toolkit or set CUDA_HOME"
_MISLEADING = ("DG_JIT_DUMP_ASM", "DG_JIT_DUMP_PTX", "DG_JIT_DUMP_SASS")
"""They would disassemble what the stub has made."""


class Shape(NamedTuple):
    """A weight ``[n, k]``, or ``[groups, n, k]`` of experts, and what it multiplies."""

    n: int
    k: int
    rows: int
    """Largest number of rows of one product."""
    groups: int = 0
    """0 for a linear layer."""


@dataclass(frozen=True)
class Job:
    """What is the same for all shapes."""

    cache: str
    """``DG_JIT_CACHE_DIR``."""
    package: str
    """Folder of the ``deep_gemm`` package."""
    nvcc: str
    gpu: str
    """Name and number of SMs: kernels differ by both."""
    device: int
    """Its number in this process."""
    full: bool
    """Try every number of rows instead of every step of the heuristics."""
    settings: dict[str, str] = field(default_factory=dict)
    """DeepGEMM's environment variables, some of which change its kernels."""

    def stamp(self, shape: Shape) -> Path:
        """The file that lists a shape's kernels once they have all been made."""
        library = sorted(Path(self.package).glob("_C*.so"))
        made_by = [_identity(path) for path in (*library, Path(self.nvcc))]
        known = [_FORMAT, self.gpu, self.full, made_by, self.settings, shape]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return Path(self.cache) / "fp8rl" / f"{digest[:32]}.json"

    def is_made(self, shape: Shape) -> bool:
        """Whether every kernel of a shape is in the cache."""
        try:
            kernels = json.loads(self.stamp(shape).read_text())
        except (OSError, ValueError):
            return False
        return all(self.has(name) for name in kernels)

    def has(self, kernel: str) -> bool:
        """Whether the cache has a kernel."""
        return (Path(self.cache) / "cache" / kernel / "kernel.cubin").is_file()


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """The compiler that DeepGEMM would use, or None if it has none."""
    named = environ.get("DG_JIT_NVCC_COMPILER")
    if named:
        path = Path(named)
        return path if path.is_file() else None
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc", path=environ.get("PATH"))
        home = str(Path(found).parent.parent) if found else "/usr/local/cuda"
    path = Path(home) / "bin" / "nvcc"
    return path if path.is_file() else None


def jit_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """DeepGEMM's variables in an environment that may change its kernels."""
    other = ("DG_JIT_CACHE_DIR", *_MISLEADING)
    return {k: v for k, v in sorted(environ.items()) if k.startswith("DG_JIT_") and k not in other}


def rows_to_try(shape: Shape, *, full: bool) -> Iterator[int]:
    """Every number of rows at which DeepGEMM may choose another kernel, the largest first.

    Its choice depends on the number of blocks of 64, 128 or 256 rows, below 33 rows also of 16 and
    32; grouped products always come in whole blocks of 128 rows.
    """
    yield shape.rows  # what vLLM runs first, to measure memory
    if shape.groups:
        yield from range(_BLOCK, shape.rows, _BLOCK)
    elif full:
        yield from range(1, shape.rows)
    else:
        steps = (1, 2, 4, 8, *range(16, 512, 16), *range(512, shape.rows, 64))
        yield from (rows for rows in steps if rows < shape.rows)


class Lister:
    """Asks DeepGEMM for the kernels of a shape, over tensors that are never read."""

    def __init__(self, job: Job, scratch: Path) -> None:
        stub = scratch / "nvcc"
        stub.write_text(_STUB.format(nvcc=job.nvcc))
        stub.chmod(0o755)
        for name in _MISLEADING:
            os.environ.pop(name, None)
        os.environ["DG_JIT_NVCC_COMPILER"] = str(stub)
        os.environ["DG_JIT_CACHE_DIR"] = str(scratch)
        # Else it takes a handle and a workspace of cuBLASLt, for which there is no use here.
        os.environ["DG_USE_PYTORCH_CUBLASLT_HANDLE"] = "1"
        os.environ["DG_USE_TEMP_CUBLASLT_WORKSPACE"] = "1"
        import torch

        self._torch = torch
        self._deep_gemm = _load_package(Path(job.package))
        self._job = job
        self._found = scratch / "cache"
        self._seen: set[str] = set()

    def kernels(self, shape: Shape) -> list[Path]:
        """Folders with the source of each kernel that no earlier shape has asked for.

        Raises:
            RuntimeError: DeepGEMM refuses the shape.
        """
        with _gpu_context():
            fresh, refusal = self._ask(shape)
        if not fresh:
            raise RuntimeError(f"DeepGEMM has no kernel for {shape}: {refusal}")
        self._seen |= fresh
        return [self._found / name for name in sorted(fresh)]

    def _ask(self, shape: Shape) -> tuple[set[str], Exception | None]:
        """Names of kernels that were not asked for before, and the last refusal."""
        refusal: Exception | None = None
        product = self._product(shape)
        for rows in rows_to_try(shape, full=self._job.full):
            try:
                product(rows)
            except RuntimeError as error:  # the empty file cannot be loaded; or an assertion
                refusal = error
        return {path.name for path in self._found.glob("kernel.*")} - self._seen, refusal

    def _product(self, shape: Shape) -> Callable[[int], None]:
        """A product as :mod:`vllm_fp8rl` calls it, over memory that only has addresses."""
        torch, deep_gemm = self._torch, self._deep_gemm
        n, k, most, groups = shape
        ahead = (groups,) if groups else ()
        weight = torch.empty((*ahead, n, k), dtype=torch.float8_e4m3fn)
        scales = torch.empty((*ahead, -(-n // _BLOCK), -(-k // _BLOCK)))
        x = torch.empty((most, k), dtype=torch.float8_e4m3fn)
        out = torch.empty((most, n), dtype=torch.bfloat16)
        experts = torch.empty(most, dtype=torch.int32)

        def call(rows: int) -> None:
            # Down the rows, in whole vectors of 16 bytes: as the activations' scales come.
            x_scales = torch.empty((-(-k // _BLOCK), -(-rows // 4) * 4)).t()[:rows]
            arguments = ((x[:rows], x_scales), (weight, scales), out[:rows])
            if groups:
                deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                    *arguments, experts[:rows], disable_ue8m0_cast=True
                )
            else:
                deep_gemm.fp8_gemm_nt(*arguments, disable_ue8m0_cast=True)

        return call


def make_kernel(job: Job, listed: Path) -> bool:
    """Compile one listed kernel into the cache; whether there was anything to do.

    Raises:
        RuntimeError: nvcc failed.
    """
    if job.has(listed.name):
        return False
    folder = Path(job.cache) / "tmp" / f"fp8rl-{uuid.uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        source, cubin = folder / "kernel.cu", folder / "kernel.cubin"
        shutil.copyfile(listed / "kernel.cu", source)
        flags = _flags((listed / _ARGUMENTS).read_text().splitlines())
        command = [job.nvcc, str(source), "-cubin", "-o", str(cubin), *flags]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{job.nvcc} failed on {listed.name}: {done.stderr.strip()[-500:]}")
        target = Path(job.cache) / "cache" / listed.name
        target.parent.mkdir(exist_ok=True)
        try:
            folder.rename(target)
        except OSError:
            if not job.has(listed.name):  # else another process was first
                raise
        return True
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(job: Job, shapes: Iterable[Shape]) -> int:
    """Make the kernels of shapes as they come; the number compiled.

    Processes that want the same shape share the work: one makes it, the others wait for it.

    Raises:
        RuntimeError: nvcc or DeepGEMM failed.
    """
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(cores) as pool:
        maker = _Maker(job, Path(scratch), pool)
        later = [shape for shape in shapes if not maker.begin(shape, wait=False)]
        maker.finish()
        for shape in later:  # by now no lock is held, so that no two processes wait for each other
            maker.begin(shape, wait=True)
            maker.finish()
        return maker.made


class _Maker:
    """Shapes under way: locked, listed, being compiled."""

    def __init__(self, job: Job, scratch: Path, pool: ThreadPoolExecutor) -> None:
        self._job = job
        self._scratch = scratch
        self._pool = pool
        self._lister: Lister | None = None
        self._open: list[tuple[Path, IO[str], list[Future[bool]], list[str]]] = []
        self.made = 0

    def begin(self, shape: Shape, *, wait: bool) -> bool:
        """List a shape and start its compilers; False where another process has it in hand."""
        if self._job.is_made(shape):
            return True
        stamp = self._job.stamp(shape)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        lock = stamp.with_suffix(".lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock.close()
            return False
        if self._job.is_made(shape):  # by the one that had the lock
            lock.close()
            return True
        self._lister = self._lister or Lister(self._job, self._scratch)
        listed = self._lister.kernels(shape)
        futures = [self._pool.submit(make_kernel, self._job, folder) for folder in listed]
        self._open.append((stamp, lock, futures, [folder.name for folder in listed]))
        return True

    def finish(self) -> None:
        """Wait for the compilers, note what was made, and let others pass."""
        for stamp, lock, futures, names in self._open:
            with lock:
                self.made += sum(future.result() for future in futures)
                fresh = stamp.with_suffix(f".{uuid.uuid4().hex}")
                fresh.write_text(json.dumps(names))
                fresh.rename(stamp)
        self._open.clear()


def _flags(arguments: list[str]) -> list[str]:
    """What nvcc was given beside its source and its output."""
    kept = iter(arguments[1:])
    flags = []
    for argument in kept:
        if argument == "-o":
            next(kept)
        elif argument != "-cubin":
            flags.append(argument)
    return flags


def _identity(path: Path) -> list[Any]:
    try:
        state = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), state.st_size, state.st_mtime_ns]


def _load_package(folder: Path) -> Any:
    """``deep_gemm`` from its folder, without importing what it is vendored in."""
    spec = importlib.util.spec_from_file_location(
        "deep_gemm", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(f"'{folder}' is no Python package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["deep_gemm"] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _gpu_context() -> Iterator[None]:
    """The context that DeepGEMM needs to describe tensors, for as short as possible.

    Engines measure what memory others use, and a context takes some hundred MiB.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # without a GPU: DeepGEMM says so
        yield
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    cuda.cuInit(0)
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    cuda.cuCtxSetCurrent(context)
    try:
        yield
    finally:
        cuda.cuCtxSetCurrent(None)
        cuda.cuDevicePrimaryCtxRelease_v2(device)


@contextmanager
def _quiet_stdout() -> Iterator[IO[str]]:
    """The answer's stream, with all that libraries print sent to stderr instead."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with answer:
        yield answer


def main() -> None:
    """A :class:`Job` as a line of JSON on stdin, then a shape a line; an answer on stdout."""
    with _quiet_stdout() as answer:
        job = Job(**json.loads(sys.stdin.readline()))
        try:
            made = run(job, (Shape(*json.loads(line)) for line in sys.stdin))
        except Exception as error:  # it must reach the engine, whatever it is
            json.dump({"made": 0, "error": f"{type(error).__name__}: {error}"}, answer)
        else:
            json.dump({"made": made, "error": None}, answer)


def header(job: Job) -> str:
    """The first line that :func:`main` reads."""
    return json.dumps(asdict(job))


if __name__ == "__main__":
    main()

"""The process that compiles: it reads a :class:`Toolchain`, then a shape per line, from stdin.

Only DeepGEMM's C++ heuristics know which kernels a weight needs. A fake nvcc writes files of no
meaning, a scratch folder stands in for the cache, and a GEMM over tensors without memory is called
for each number of rows at which the choice can change: each leaves its kernel's source in the
scratch folder, then fails to load such a file. Then nvcc compiles the sources on many cores.

Written against DeepGEMM 2.5.0 (vLLM 0.25.1, 0.26.0: ``csrc/jit/compiler.hpp``) and 2.8.0 (vLLM
0.32.0), whose compiler is DeepJIT (``include/deep_jit/cache/disk.hpp``).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_FAKE_NVCC = """#!/bin/sh
for argument in "$@"; do
  if [ "$argument" = --version ]; then exec "{nvcc}" "$@"; fi
done
for argument in "$@"; do
  case "$previous" in -o | --output-file) echo none > "$argument"; output="$argument" ;; esac
  previous="$argument"
done
printf '%s\\n' "$@" > "$output.arguments"
"""
_ARGUMENTS = "kernel.cubin.arguments"


class Shape(NamedTuple):
    """The FP8 weight of one layer, ``[n, k]`` or ``[experts, n, k]``, for at most so many rows."""

    n: int
    k: int
    rows: int
    experts: int = 0


class Toolchain(NamedTuple):
    """Folder of compiled kernels (``DG_JIT_CACHE_DIR``), folder of the package ``deep_gemm``,
    compiler, and a ``key`` of all else that kernels depend on."""

    cache: str
    package: str
    nvcc: str
    key: str

    def record(self, shape: Shape) -> Path:
        """Return the file that names a shape's kernels once they have been listed."""
        digest = hashlib.sha256(json.dumps([self.key, shape]).encode()).hexdigest()
        return Path(self.cache, "fp8rl", f"{digest[:32]}.json")

    def is_compiled(self, shape: Shape) -> bool:
        """Return whether the cache has every kernel of a shape."""
        try:
            return all(map(self.has, json.loads(self.record(shape).read_text())))
        except (OSError, ValueError):
            return False

    def has(self, kernel: str) -> bool:
        """Return whether the cache has a kernel."""
        return Path(self.cache, "cache", kernel, "kernel.cubin").is_file()


def compile_shapes(toolchain: Toolchain, shapes: Iterable[Shape]) -> int:
    """Compile the kernels of shapes as they arrive and return the number compiled."""
    cores = len(os.sched_getaffinity(0))
    # torch.compile runs at the same time, and takes longer beside as many compilers as cores.
    compilers = max(cores // 2, min(cores, 8))
    own = Path(toolchain.cache, "fp8rl")
    own.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=own) as scratch, ThreadPoolExecutor(compilers) as pool:
        deep_gemm, listed, compiled = None, set[str](), []
        for shape in shapes:
            if toolchain.is_compiled(shape):
                continue
            deep_gemm = deep_gemm or load_deep_gemm(toolchain, Path(scratch))
            error = list_kernels(deep_gemm, shape)
            found = [at.parent for at in sorted(Path(scratch).glob(f"cache/*/{_ARGUMENTS}"))]
            kernels = [kernel for kernel in found if kernel.name not in listed]
            if not kernels:
                raise RuntimeError(f"DeepGEMM has no kernel for {shape}: {error}")
            listed |= {kernel.name for kernel in kernels}
            compiled += [pool.submit(compile_kernel, toolchain, kernel) for kernel in kernels]
            # It may be there before its kernels: whoever reads it looks for them.
            toolchain.record(shape).write_text(json.dumps([kernel.name for kernel in kernels]))
        return sum(kernel.result() for kernel in compiled)


def load_deep_gemm(toolchain: Toolchain, scratch: Path) -> Any:
    """Import DeepGEMM, without the package that vendors it, so that it lists into ``scratch``."""
    fake = scratch / "nvcc"
    fake.write_text(_FAKE_NVCC.format(nvcc=toolchain.nvcc))
    fake.chmod(0o755)
    for what in ("ASM", "PTX", "SASS"):  # it would disassemble files that are no kernels
        for jit in ("DG", "DJ"):
            os.environ.pop(f"{jit}_JIT_DUMP_{what}", None)
    # Without the last two, DeepGEMM allocates a handle and a workspace of cuBLASLt on the GPU.
    os.environ.update(
        DG_JIT_NVCC_COMPILER=str(fake),
        DG_JIT_CACHE_DIR=str(scratch),
        DG_USE_PYTORCH_CUBLASLT_HANDLE="1",
        DG_USE_TEMP_CUBLASLT_WORKSPACE="1",
    )
    folder = Path(toolchain.package)
    sys.path.append(str(folder.parent))
    return importlib.import_module(folder.name)


def list_kernels(deep_gemm: Any, shape: Shape) -> Exception | None:
    """Call a GEMM as :mod:`vllm_fp8rl` does, with each number of rows; return the last error."""
    import torch

    n, k, _, experts = shape
    ahead, f8, error = (experts,) if experts else (), torch.float8_e4m3fn, None
    weight = _tensor(f8, *ahead, n, k), _tensor(torch.float32, *ahead, -(-n // 128), -(-k // 128))
    name = "m_grouped_fp8_gemm_nt_contiguous" if experts else "fp8_gemm_nt"
    multiply = getattr(deep_gemm, name)
    with _gpu_context():
        for rows in rows_to_try(shape):
            # The scales are column-major, padded to vectors of 16 bytes.
            scales = _tensor(torch.float32, rows, -(-k // 128), stride=(1, -(-rows // 4) * 4))
            operands = (_tensor(f8, rows, k), scales), weight, _tensor(torch.bfloat16, rows, n)
            of_rows = (_tensor(torch.int32, rows),) if experts else ()
            try:
                multiply(*operands, *of_rows, disable_ue8m0_cast=True)
            except RuntimeError as refusal:  # the fake file cannot be loaded, or an assertion
                error = refusal
    return error


def rows_to_try(shape: Shape) -> Iterator[int]:
    """Yield every number of rows at which DeepGEMM may choose another kernel, the largest first.

    The choice depends on the number of blocks of 64, 128 or 256 rows; below 33 rows also on blocks
    of 16 and 32. GEMMs of experts always have whole blocks of 128 rows.
    """
    yield shape.rows  # vLLM runs this one first, to measure memory
    steps: Iterable[int] = (1, 2, 4, 8, *range(16, 512, 16), *range(512, shape.rows, 64))
    if shape.experts:
        steps = range(128, shape.rows, 128)
    yield from (rows for rows in steps if rows < shape.rows)


def _tensor(dtype: Any, *shape: int, stride: tuple[int, ...] | None = None) -> Any:
    """Return a tensor without memory on the GPU; on the CPU with a torch that is built for CPUs."""
    import torch

    meta = torch.empty(shape, dtype=dtype, device="meta")
    if stride is not None:
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if torch.version.cuda is None:
        return torch.empty_like(meta, device="cpu")
    gpu = torch.device("cuda", 0)
    described = {"size": meta.shape, "stride": meta.stride(), "dtype": dtype, "device": gpu}
    storage = torch._C._construct_storage_from_data_pointer(  # aligned, and never read
        1 << 12, gpu, meta.untyped_storage().nbytes()
    )
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        described | {"storage_offset": 0}, storage
    )


@contextmanager
def _gpu_context() -> Iterator[None]:
    """Hold the CUDA context that DeepGEMM needs to describe tensors, for as short as possible.

    A context takes some hundred MiB, and an engine measures what memory other processes use. It is
    reset, because DeepGEMM 2.8 also holds it.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU, which DeepGEMM reports
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
        cuda.cuDevicePrimaryCtxReset_v2(device)


def compile_kernel(toolchain: Toolchain, listed: Path) -> bool:
    """Compile a listed kernel into the cache; return False if another process does or did."""
    target = Path(toolchain.cache, "cache", listed.name)
    with Path(toolchain.cache, "fp8rl", f"{listed.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if toolchain.has(listed.name):
            return False
        _, *flags = (listed / _ARGUMENTS).read_text().splitlines()  # without the source
        (listed / _ARGUMENTS).unlink()
        output = next(i for i, flag in enumerate(flags) if flag in ("-o", "--output-file")) + 1
        flags[output] = str(listed / "kernel.cubin")
        # `timeout` ends what nvcc has started, too.
        command = ["timeout", "300", toolchain.nvcc, str(listed / "kernel.cu"), *flags]
        done = subprocess.run(command, cwd=listed, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"nvcc failed on {listed.name}: {done.stderr.strip()[-400:]}")
        target.parent.mkdir(exist_ok=True)
        try:
            listed.rename(target)  # at once, as DeepGEMM's own do
        except OSError:
            if not toolchain.has(listed.name):  # otherwise the engine compiled it meanwhile
                raise
        return True


def main() -> None:
    """Compile for one engine; the last line of the output is the number of kernels."""
    toolchain = Toolchain(*json.loads(sys.stdin.readline()))
    compiled = compile_shapes(toolchain, (Shape(*json.loads(line)) for line in sys.stdin))
    sys.stdout.write(f"\n{compiled}\n")

"""Ask DeepGEMM which kernels a weight needs, without compiling or running any.

Only DeepGEMM's C++ heuristics know the kernels. A fake nvcc (``DG_JIT_NVCC_COMPILER``) writes files
of no meaning, a scratch folder stands in for the cache (``DG_JIT_CACHE_DIR``), and a GEMM is called
for each number of rows at which the choice can change. Each call leaves the source of its kernel in
the scratch folder and then fails to load such a file. The tensors have no memory.

Written against DeepGEMM 2.5.0 (vendored by vLLM 0.25.1 and 0.26.0; ``csrc/jit/compiler.hpp`` and
``csrc/jit_kernels/heuristics``) and 2.8.0 (vLLM 0.32.0), whose compiler is DeepJIT
(``include/deep_jit/cache/disk.hpp``, ``backend/cuda/backend.hpp``).
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_fp8rl.warmup.shapes import Shape, Toolchain

if TYPE_CHECKING:
    import torch

_BLOCK = 128
_ADDRESS = 1 << 12
"""Of every tensor: aligned as DeepGEMM requires, and never read."""
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
_DISASSEMBLY = tuple(
    f"{of}_JIT_DUMP_{what}" for of in ("DG", "DJ") for what in ("ASM", "PTX", "SASS")
)
"""Variables with which DeepGEMM disassembles a compiled kernel, which the fake files are not."""
CACHED = ("kernel.cubin", _ARGUMENTS)
"""What the real compiler makes, and what the fake one notes; other files are of the cache entry."""


class KernelSources:
    """Sources of the kernels of shapes. It changes DeepGEMM's environment for the whole process."""

    def __init__(self, toolchain: Toolchain, scratch: Path) -> None:
        fake = scratch / "nvcc"
        fake.write_text(_FAKE_NVCC.format(nvcc=toolchain.nvcc))
        fake.chmod(0o755)
        for name in _DISASSEMBLY:
            os.environ.pop(name, None)
        os.environ["DG_JIT_NVCC_COMPILER"] = str(fake)
        os.environ["DG_JIT_CACHE_DIR"] = str(scratch)
        # Without these, DeepGEMM allocates a handle and a workspace of cuBLASLt on the GPU.
        os.environ["DG_USE_PYTORCH_CUBLASLT_HANDLE"] = "1"
        os.environ["DG_USE_TEMP_CUBLASLT_WORKSPACE"] = "1"
        self._deep_gemm = _load_package(Path(toolchain.package))
        self._full = toolchain.full
        self._found = scratch / "cache"
        self._listed: set[str] = set()

    def kernels(self, shape: Shape) -> list[Path]:
        """Return folders with the sources of the kernels that no earlier shape needed."""
        refusal: Exception | None = None
        gemm = _gemm(self._deep_gemm, shape)
        with _gpu_context():
            for rows in rows_to_try(shape, full=self._full):
                try:
                    gemm(rows)
                except RuntimeError as error:  # the fake file cannot be loaded, or an assertion
                    refusal = error
        fresh = {path.parent.name for path in self._found.glob(f"*/{_ARGUMENTS}")} - self._listed
        if not fresh:
            raise RuntimeError(f"DeepGEMM has no kernel for {shape}: {refusal}")
        self._listed |= fresh
        return [self._found / name for name in sorted(fresh)]


def rows_to_try(shape: Shape, *, full: bool) -> Iterator[int]:
    """Yield every number of rows at which DeepGEMM may choose another kernel, the largest first.

    The choice depends on the number of blocks of 64, 128 or 256 rows; below 33 rows also on blocks
    of 16 and 32. GEMMs of experts always have whole blocks of 128 rows.
    """
    yield shape.rows  # vLLM runs this one first, to measure memory
    if shape.groups:
        yield from range(_BLOCK, shape.rows, _BLOCK)
    elif full:
        yield from range(1, shape.rows)
    else:
        steps = (1, 2, 4, 8, *range(16, 512, 16), *range(512, shape.rows, 64))
        yield from (rows for rows in steps if rows < shape.rows)


def compiler_flags(listed: Path) -> list[str]:
    """Return what DeepGEMM gave to nvcc for a listed kernel, beside the source and the output."""
    arguments = iter((listed / _ARGUMENTS).read_text().splitlines()[1:])  # after the source
    flags = []
    for argument in arguments:
        if argument in ("-o", "--output-file"):
            next(arguments)
        elif argument not in ("-cubin", "--cubin"):
            flags.append(argument)
    return flags


def _gemm(deep_gemm: Any, shape: Shape) -> Callable[[int], None]:
    """Return a GEMM as :mod:`vllm_fp8rl` calls it, over tensors without memory."""
    import torch

    n, k, _, groups = shape
    ahead = (groups,) if groups else ()
    weight = _tensor(torch.float8_e4m3fn, *ahead, n, k)
    scales = _tensor(torch.float32, *ahead, -(-n // _BLOCK), -(-k // _BLOCK))

    def call(rows: int) -> None:
        x = _tensor(torch.float8_e4m3fn, rows, k)
        # The activations' scales are column-major, padded to vectors of 16 bytes.
        by_group = _tensor(torch.float32, rows, -(-k // _BLOCK), stride=(1, -(-rows // 4) * 4))
        operands = ((x, by_group), (weight, scales), _tensor(torch.bfloat16, rows, n))
        if groups:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                *operands, _tensor(torch.int32, rows), disable_ue8m0_cast=True
            )
        else:
            deep_gemm.fp8_gemm_nt(*operands, disable_ue8m0_cast=True)

    return call


def _tensor(dtype: torch.dtype, *shape: int, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a tensor without memory on the GPU, as DeepGEMM requires from 2.8 on.

    A torch that is built for CPUs gives one on the CPU.
    """
    import torch

    meta = torch.empty(shape, dtype=dtype, device="meta")
    if stride is not None:
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if torch.version.cuda is None:
        return torch.empty_like(meta, device="cpu")
    gpu = torch.device("cuda", 0)
    described = {"size": meta.shape, "stride": meta.stride(), "dtype": dtype, "device": gpu}
    storage = torch._C._construct_storage_from_data_pointer(
        _ADDRESS, gpu, meta.untyped_storage().nbytes()
    )
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
        described | {"storage_offset": 0}, storage
    )


def _load_package(folder: Path) -> Any:
    """Import ``deep_gemm`` from its folder, without the package that vendors it."""
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

"""Have DeepGEMM's kernels compiled while a model loads, so that its first steps find them ready.

vLLM's own warm-up runs after loading, one kernel at a time, and in 0.25.1 only for its own
``Fp8LinearMethod`` (``vllm/model_executor/warmup/deep_gemm_warmup.py``). Here the shapes are known
while layers are built, and a process of its own (:mod:`vllm_fp8rl.deep_gemm_warmup.compile`) compiles for all
of them at once, beside the loading of weights, torch.compile and the capture of graphs. Nobody has
to wait for it: a kernel that is met too early is compiled by DeepGEMM as ever, and whichever of the
two is done first fills the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from vllm.logger import init_logger

from vllm_fp8rl.deep_gemm_warmup import compile as deep_gemm_jit
from vllm_fp8rl.deep_gemm_warmup.compile import Job, Shape

logger = init_logger("vllm.fp8rl")

_SKIP = "VLLM_DEEP_GEMM_WARMUP=skip leaves this out."


class KernelWarmup:
    """The kernels of one engine on one rank: :meth:`add` shapes, then :meth:`close`.

    Nothing here can stop an engine: where compiling ahead fails, a warning says so.

    Args:
        rows: largest number of rows of one product of a linear layer.
        find_job: what is the same for all shapes, or None to leave kernels to be compiled when met;
            called once, at the first shape.
    """

    def __init__(self, rows: int, find_job: Callable[[], Job | None]) -> None:
        self.rows = rows
        self._find_job = find_job
        self._job: Job | None = None
        self._shapes: set[Shape] = set()
        self._process: subprocess.Popen[str] | None = None
        self._watcher: threading.Thread | None = None

    def add(self, n: int, k: int) -> None:
        """Have the kernels of a linear weight ``[n, k]`` compiled, unless the cache has them."""
        self._add(Shape(n, k, self.rows))

    def add_experts(self, experts: int, n: int, k: int, rows: int) -> None:
        """Have the kernels of ``experts`` weights ``[n, k]`` compiled, for up to ``rows`` rows."""
        self._add(Shape(n, k, rows, experts))

    def close(self) -> None:
        """All shapes are known; may be called any number of times."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has died, which the watcher reports
                self._process.stdin.close()
            self._process.stdin = None

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the compilers are done, for at most ``timeout`` seconds; whether they are."""
        self.close()
        if self._watcher is None:
            return True
        self._watcher.join(timeout)
        return not self._watcher.is_alive()

    def _add(self, shape: Shape) -> None:
        if shape in self._shapes:
            return
        if not self._shapes:
            self._job = self._find_job()
        self._shapes.add(shape)
        if self._job is None or self._job.is_made(shape):
            return
        if self._process is None:
            self._start(self._job)
        assert self._process is not None
        if self._process.stdin is not None:  # else a layer built after its model was loaded
            _write(self._process.stdin, json.dumps(shape))

    def _start(self, job: Job) -> None:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the watcher closes it
        # -P: the folder of the program holds modules whose names others use too.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(deep_gemm_jit.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | _child_environment(job.device),
        )
        assert self._process.stdin is not None
        _write(self._process.stdin, deep_gemm_jit.header(job))
        self._watcher = threading.Thread(
            target=_watch, args=(self._process, errors, self._shapes), daemon=True
        )
        self._watcher.start()


def deep_gemm_job() -> Job | None:
    """The job for the DeepGEMM that vLLM uses in this process, or None if it is to be left alone.

    Call it once vLLM has chosen DeepGEMM for a layer: the package is imported and its cache named
    by then (``vllm/utils/deep_gemm.py``).
    """
    import torch
    from vllm import envs

    mode = envs.VLLM_DEEP_GEMM_WARMUP
    if mode == "skip":
        return None
    names = ("deep_gemm", "vllm.third_party.deep_gemm")
    package = next((sys.modules[name] for name in names if name in sys.modules), None)
    cache = os.environ.get("DG_JIT_CACHE_DIR")
    nvcc = deep_gemm_jit.find_nvcc(os.environ)
    if os.environ.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        obstacle = "DG_JIT_USE_NVRTC is set, but they are compiled with nvcc"
    elif package is None or package.__file__ is None or cache is None:
        obstacle = "vLLM has not imported deep_gemm"
    elif nvcc is None:
        obstacle = deep_gemm_jit.NO_NVCC
    else:
        device = torch.cuda.current_device()
        gpu = torch.cuda.get_device_properties(device)
        return Job(
            cache=cache,
            package=str(Path(package.__file__).parent),
            nvcc=str(nvcc),
            gpu=f"{gpu.name}, {gpu.multi_processor_count} SMs",
            device=device,
            full=mode == "full",
            settings=deep_gemm_jit.jit_settings(os.environ),
        )
    _warn(obstacle)
    return None


def _child_environment(device: int) -> dict[str, str]:
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": visible[device] if device < len(visible) else str(device),
    }


def _watch(process: subprocess.Popen[str], errors: IO[str], shapes: set[Shape]) -> None:
    began = time.perf_counter()
    assert process.stdout is not None
    with errors:
        answer = process.stdout.read()
        code = process.wait()
        errors.seek(0)
        tail = errors.read().strip()[-500:]
    try:
        outcome = json.loads(answer)
    except ValueError:
        outcome = {"error": tail or f"exit code {code}"}
    if outcome["error"] is not None:
        _warn(outcome["error"])
        return
    logger.info(
        "fp8rl: %d DeepGEMM kernels for %d weight shapes compiled ahead in %.1f s",
        outcome["made"],
        len(shapes),
        time.perf_counter() - began,
    )


def _warn(why: str) -> None:
    logger.warning(
        "fp8rl: DeepGEMM's kernels are not compiled ahead, so the first steps will be slow: %s. %s",
        why,
        _SKIP,
    )


def _write(stream: IO[str], line: str) -> None:
    with suppress(BrokenPipeError):  # the process has died, which the watcher reports
        stream.write(line + "\n")
        stream.flush()

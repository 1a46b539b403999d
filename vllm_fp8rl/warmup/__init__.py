"""Compile DeepGEMM's kernels while a model loads, so that its first steps find them ready.

vLLM calls each layer before the first request, in its profile run and in its own warm-up, and
DeepGEMM compiles what such a call needs: one kernel after the other, about 2 s each, while the
engine waits (291 s in place of 104 for Qwen3-8B's shape, vLLM 0.32.0, an H200). All that is left to
do is to fill DeepGEMM's cache on many cores before: :mod:`vllm_fp8rl.warmup.compile_kernels`, a
process of its own. This folder can go when vLLM compiles in parallel.

Importing this imports no engine.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vllm_fp8rl.warmup import compile_kernels
from vllm_fp8rl.warmup.compile_kernels import Shape, Toolchain

# Under vLLM's name, so that its log level and format apply in every worker.
logger = logging.getLogger("vllm.fp8rl")
_SETTINGS = ("DG_JIT_", "DJ_JIT_")
NO_NVCC = "there is no nvcc; install the CUDA toolkit or set CUDA_HOME"


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the compiler that DeepGEMM would use in an environment, or None if it has none."""
    named = environ.get("DG_JIT_NVCC_COMPILER")
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc", path=environ.get("PATH"))
        home = str(Path(found).parent.parent) if found else "/usr/local/cuda"
    path = Path(named) if named else Path(home) / "bin" / "nvcc"
    return path if path.is_file() else None


def find_toolchain() -> Toolchain | None:
    """Describe the DeepGEMM that vLLM uses in this process, or return None to leave it alone.

    Call it once vLLM has chosen DeepGEMM for a layer: by then the package is imported and its cache
    is named (``vllm/utils/deep_gemm.py``). ``VLLM_DEEP_GEMM_WARMUP=skip`` changes nothing: it is
    about vLLM's own warm-up, for which an engine waits.
    """
    import torch

    names = ("deep_gemm", "vllm.third_party.deep_gemm")
    package = next((sys.modules[name].__file__ for name in names if name in sys.modules), None)
    cache, nvcc = os.environ.get("DG_JIT_CACHE_DIR"), find_nvcc(os.environ)
    if os.environ.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        _warn("DG_JIT_USE_NVRTC is set, but they are compiled with nvcc")
    elif torch.cuda.get_device_capability() != (9, 0):
        _warn("DeepGEMM packs scales on this GPU, so kernels would run when they are listed")
    elif package is None or cache is None or nvcc is None:
        _warn(f"vLLM has not imported deep_gemm, or {NO_NVCC}")
    else:
        folder = Path(package).parent
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        known: list[Any] = [gpu.name, gpu.multi_processor_count]
        for path in (*sorted(folder.glob("_C*.so")), nvcc):
            known.append([str(path), path.stat().st_size, path.stat().st_mtime_ns])
        known += sorted(pair for pair in os.environ.items() if pair[0].startswith(_SETTINGS))
        # Of folders that are named after the first, DeepGEMM only reads, from 2.8 on.
        return Toolchain(cache.split(":")[0], str(folder), str(nvcc), json.dumps(known))
    return None


class KernelWarmup:
    """The kernels of one engine on one rank: tell it each weight, then :meth:`close`.

    Compiling starts with the first weight, while the engine loads weights, runs torch.compile and
    captures graphs. Nothing waits for it: if the engine calls a kernel too early, DeepGEMM compiles
    it as usual. A failure is logged as a warning and never stops the engine. A linear layer
    multiplies ``rows`` at once at most.
    """

    def __init__(
        self, rows: int, find_toolchain: Callable[[], Toolchain | None] = find_toolchain
    ) -> None:
        self.rows = rows
        self._find_toolchain = find_toolchain
        self._toolchain: Toolchain | None = None
        self._shapes: set[Shape] = set()
        self._process: subprocess.Popen[str] | None = None
        self.watcher: threading.Thread | None = None

    def add(self, n: int, k: int, rows: int | None = None, experts: int = 0) -> None:
        """Take the weight of a linear layer, ``[n, k]``, or of experts, ``[experts, n, k]``."""
        shape = Shape(n, k, self.rows if rows is None else rows, experts)
        if shape in self._shapes:
            return
        if not self._shapes:
            self._toolchain = self._find_toolchain()
        self._shapes.add(shape)
        if self._toolchain is None or self._toolchain.is_compiled(shape):
            return
        if self._process is None:
            try:
                self._start(self._toolchain)
            except OSError as error:  # no memory for a process, or no room for its log
                _warn(f"their process cannot be started ({error})")
                self._toolchain = None
                return
        self._send(shape)

    def close(self) -> None:
        """No further weight will come. May be called any number of times."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has died, which the watcher reports
                self._process.stdin.close()
            self._process.stdin = None

    def _start(self, toolchain: Toolchain) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {compile_kernels.__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | _child_environment(),
        )
        self._send(toolchain)
        self.watcher = threading.Thread(target=self._watch, args=(self._process,), daemon=True)
        self.watcher.start()

    def _send(self, line: Toolchain | Shape) -> None:
        assert self._process is not None
        if self._process.stdin is not None:  # else this layer was built after its model was loaded
            with suppress(BrokenPipeError):  # it has died, which the watcher reports
                print(json.dumps(line), file=self._process.stdin, flush=True)

    def _watch(self, process: subprocess.Popen[str]) -> None:
        began = time.perf_counter()
        assert process.stdout is not None
        with process.stdout as stream:
            output = stream.read().strip()
        if process.wait():
            _warn(output[-500:] or f"exit code {process.returncode}")
            return
        text = "fp8rl: %s DeepGEMM kernels for %d weight shapes compiled ahead in %.1f s"
        seconds, count = time.perf_counter() - began, output.rpartition("\n")[2]
        logger.info(text, count, len(self._shapes), seconds)


def _child_environment() -> dict[str, str]:
    import torch

    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "CUDA_VISIBLE_DEVICES": visible[device] if device < len(visible) else str(device),
    }


def _warn(reason: str) -> None:
    logger.warning(
        "fp8rl: DeepGEMM's kernels are not compiled ahead, so the first steps will be slow: %s.",
        reason,
    )

"""Start the process that compiles, tell it the shapes, and log how it ended.

Importing this imports no engine.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from vllm_fp8rl.warmup.shapes import Shape, Toolchain

# Under vLLM's name, so that its log level and format apply in every worker.
logger = logging.getLogger("vllm.fp8rl")
_SETTINGS = ("DG_JIT_", "DJ_JIT_")
NO_NVCC = "there is no nvcc; install the CUDA toolkit or set CUDA_HOME"


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the compiler that DeepGEMM would use in an environment, or None if it has none."""
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


def find_toolchain() -> Toolchain | None:
    """Describe the DeepGEMM that vLLM uses in this process, or return None to leave it alone.

    Call it once vLLM has chosen DeepGEMM for a layer: by then the package is imported and its cache
    is named (``vllm/utils/deep_gemm.py``). ``VLLM_DEEP_GEMM_WARMUP=skip`` changes nothing: it is
    about vLLM's own warm-up, for which an engine waits. Nothing waits for this one, and without it
    an engine compiles the same kernels one by one while it captures graphs.
    """
    import torch
    from vllm import envs

    names = ("deep_gemm", "vllm.third_party.deep_gemm")
    package = next((sys.modules[name] for name in names if name in sys.modules), None)
    cache = os.environ.get("DG_JIT_CACHE_DIR")
    nvcc = find_nvcc(os.environ)
    if os.environ.get("DG_JIT_USE_NVRTC", "0") not in ("", "0"):
        _warn("DG_JIT_USE_NVRTC is set, but they are compiled with nvcc")
    elif package is None or package.__file__ is None or cache is None:
        _warn("vLLM has not imported deep_gemm")
    elif nvcc is None:
        _warn(NO_NVCC)
    elif torch.cuda.get_device_capability() != (9, 0):
        _warn("DeepGEMM packs scales on this GPU, so kernels would run when they are listed")
    else:
        device = torch.cuda.current_device()
        gpu = torch.cuda.get_device_properties(device)
        return Toolchain(
            cache=cache.split(":")[0],  # more folders are only read, from DeepGEMM 2.8 on
            package=str(Path(package.__file__).parent),
            nvcc=str(nvcc),
            gpu=f"{gpu.name}, {gpu.multi_processor_count} SMs",
            device=device,
            full=envs.VLLM_DEEP_GEMM_WARMUP == "full",
            settings={k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)},
        )
    return None


class KernelWarmup:
    """The kernels of one engine on one rank: tell it each weight, then :meth:`close`.

    Compiling starts with the first weight, in a separate process, while the engine loads weights,
    runs torch.compile and captures graphs. Nothing waits for it: if the engine calls a kernel too
    early, DeepGEMM compiles it as usual, and whichever of the two is first fills the cache. A
    failure is logged as a warning and never stops the engine.

    Args:
        rows: largest number of rows that a linear layer multiplies at once.
        find_toolchain: describes DeepGEMM or returns None to compile nothing ahead; called once, at
            the first weight.
    """

    def __init__(
        self, rows: int, find_toolchain: Callable[[], Toolchain | None] = find_toolchain
    ) -> None:
        self.rows = rows
        self._find_toolchain = find_toolchain
        self._toolchain: Toolchain | None = None
        self._shapes: set[Shape] = set()
        self._process: subprocess.Popen[str] | None = None
        self._watcher: threading.Thread | None = None

    def add(self, n: int, k: int, rows: int | None = None, experts: int = 0) -> None:
        """Take the FP8 weight of a linear layer, ``[n, k]``, or of experts, ``[experts, n, k]``.

        Args:
            n: output features.
            k: input features.
            rows: largest number of rows that are multiplied at once; that of the engine by default.
            experts: number of experts; 0 for a linear layer.
        """
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
        self._send(json.dumps(shape))

    def close(self) -> None:
        """No further weight will come. May be called any number of times."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has died, which the watcher reports
                self._process.stdin.close()
            self._process.stdin = None

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for the compilers; return whether they are done."""
        self.close()
        if self._watcher is None:
            return True
        self._watcher.join(timeout)
        return not self._watcher.is_alive()

    def _start(self, toolchain: Toolchain) -> None:
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the watcher closes it
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vllm_fp8rl.warmup.compile_kernels"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | _child_environment(toolchain.device),
        )
        self._send(json.dumps(asdict(toolchain)))
        self._watcher = threading.Thread(
            target=_watch, args=(self._process, errors, self._shapes), daemon=True
        )
        self._watcher.start()

    def _send(self, line: str) -> None:
        assert self._process is not None
        stream = self._process.stdin
        if stream is None:  # closed: this layer was built after its model was loaded
            return
        with suppress(BrokenPipeError):  # it has died, which the watcher reports
            stream.write(line + "\n")
            stream.flush()


def _child_environment(device: int) -> dict[str, str]:
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
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
        outcome["compiled"],
        len(shapes),
        time.perf_counter() - began,
    )


def _warn(reason: str) -> None:
    logger.warning(
        "fp8rl: DeepGEMM's kernels are not compiled ahead, so the first steps will be slow: %s.",
        reason,
    )

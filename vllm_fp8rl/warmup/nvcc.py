"""The CUDA compiler that DeepGEMM needs. Importing this imports no engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

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

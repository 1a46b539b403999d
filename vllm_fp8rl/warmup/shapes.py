"""What is compiled ahead, and how DeepGEMM's cache shows that it is there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_FORMAT = 1  # part of each record's name: raise it when records change their meaning


class Shape(NamedTuple):
    """The FP8 weight of one layer: ``[n, k]``, or ``[groups, n, k]`` for experts."""

    n: int
    k: int
    rows: int
    """Largest number of rows that are multiplied at once."""
    groups: int = 0
    """Number of experts; 0 for a linear layer."""


@dataclass(frozen=True)
class Toolchain:
    """Everything that all shapes of one engine on one rank share."""

    cache: str
    """``DG_JIT_CACHE_DIR``, the folder in which DeepGEMM keeps compiled kernels."""
    package: str
    """Folder of the ``deep_gemm`` package."""
    nvcc: str
    """Path of the compiler."""
    gpu: str
    """Name and number of SMs of the GPU: kernels depend on both."""
    device: int
    """Index of the GPU in this process."""
    full: bool
    """Ask for every number of rows instead of every step of DeepGEMM's heuristics."""
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables of DeepGEMM's compiler, some of which change its kernels."""

    def record(self, shape: Shape) -> Path:
        """Return the file that names a shape's kernels once all of them have been compiled."""
        library = sorted(Path(self.package).glob("_C*.so"))
        tools = [_identity(path) for path in (*library, Path(self.nvcc))]
        known = [_FORMAT, self.gpu, self.full, tools, self.settings, shape]
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return Path(self.cache) / "fp8rl" / f"{digest[:32]}.json"

    def is_compiled(self, shape: Shape) -> bool:
        """Return whether the cache has every kernel of a shape."""
        try:
            kernels = json.loads(self.record(shape).read_text())
        except (OSError, ValueError):
            return False
        return all(self.has(name) for name in kernels)

    def has(self, kernel: str) -> bool:
        """Return whether the cache has a kernel."""
        return (Path(self.cache) / "cache" / kernel / "kernel.cubin").is_file()


def _identity(path: Path) -> list[Any]:
    try:
        state = path.stat()
    except OSError:
        return [str(path)]
    return [str(path), state.st_size, state.st_mtime_ns]

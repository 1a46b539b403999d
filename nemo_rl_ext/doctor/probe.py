"""What an interpreter has of fp8rl; the text of this file is run by each, so it imports no more."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("fp8rl", "nemo_rl_ext", "vllm_fp8rl", "megatron_fp8rl", "torch_fp8rl")
MODULES = ("fp8rl", "nemo_rl_ext", "wrapt")
DISTRIBUTIONS = ("wrapt", "pluggy", "pydantic")
GROUPS = ("torch.backends", "vllm.general_plugins")


def report() -> dict[str, Any]:
    """Return what was found, as JSON takes it; torch and the engines are not imported."""
    folders = [_folder(name) for name in PACKAGES]
    return {
        "errors": {name: _error(name) for name in MODULES},  # first: it imports them
        "python": "{}.{}.{}".format(*sys.version_info[:3]),
        "prefix": str(Path(sys.prefix).resolve()),
        "folder": None if folders[0] is None else str(folders[0]),
        "fp8rl": getattr(sys.modules.get("fp8rl"), "__version__", None),
        "code": _digest(folders),
        "versions": {name: _version(name) for name in DISTRIBUTIONS},
        "entry points": [
            group
            for group in GROUPS
            if any(point.name == "fp8rl" for point in importlib.metadata.entry_points(group=group))
        ],
        "DeepGEMM": _deep_gemm(),
    }


def _folder(package: str) -> Path | None:
    """Return the folder of a package without importing it."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _deep_gemm() -> str | None:
    """Return the version of DeepGEMM, or where its copy is, as fp8rl looks for it."""
    if _folder("deep_gemm") is not None:
        return _version("deep-gemm") or "yes"
    vllm = _folder("vllm")
    copy = vllm and vllm / "third_party" / "deep_gemm" / "__init__.py"
    return "vLLM's copy" if copy and copy.is_file() else None


def _error(module: str) -> str | None:
    """Return why a module cannot be imported, or None."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _digest(folders: list[Path | None]) -> str | None:
    """Return a digest of all Python files of the packages, None if one of them is missing."""
    total = hashlib.sha256()
    for folder in folders:
        if folder is None:
            return None
        for file in sorted(folder.rglob("*.py")):
            total.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report()) + "\n")

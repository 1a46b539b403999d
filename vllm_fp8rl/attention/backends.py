"""The classes that vLLM imports as its attention backends ``CPU_ATTN`` and ``FLASH_ATTN``."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from vllm_fp8rl.compat import untested
from vllm_fp8rl.patches.probes import failures


def __getattr__(name: str) -> Any:
    """Return fp8rl's class, or vLLM's own if a release that was not tested fails a probe.

    vLLM imports a backend when an engine chooses its attention, so that no other process runs the
    probes. An engine with ``quantization="fp8rl"`` raises for the same probe.
    """
    if name == "CPU_ATTN":
        if untested("cpu") is None or not failures({"cpu"}):
            from vllm_fp8rl.attention.cpu import Fp8RLCpuBackend

            return Fp8RLCpuBackend
        return _own(name)
    if name == "FLASH_ATTN":
        if untested("cuda") is None or not failures({"cuda"}):
            from vllm_fp8rl.attention.flash import Fp8RLFlashBackend

            return Fp8RLFlashBackend
        return _own(name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def _own(name: str) -> Any:
    """Return vLLM's own class, whose path is the value of the registry's member."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return resolve_name(AttentionBackendEnum[name].value)

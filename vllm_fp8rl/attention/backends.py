"""The classes that vLLM imports as ``CPU_ATTN``, ``FLASH_ATTN`` and ``TRITON_ATTN``."""

from __future__ import annotations

from typing import Any

from vllm_fp8rl.compat import untested
from vllm_fp8rl.patches.probes import failures

_OURS = {
    "CPU_ATTN": ("cpu", "vllm_fp8rl.attention.cpu.Fp8RLCpuBackend"),
    "FLASH_ATTN": ("cuda", "vllm_fp8rl.attention.fp8.Fp8RLFlashBackend"),
    "TRITON_ATTN": ("cuda", "vllm_fp8rl.attention.int8.Fp8RLTritonBackend"),
}
"""Name of a backend -> device whose probes it needs, path of the class."""


def __getattr__(name: str) -> Any:
    """Return fp8rl's class, or vLLM's own if a release that was not tested fails a probe.

    vLLM imports a backend when an engine chooses its attention, so that no other process runs the
    probes. The choice is written into vLLM's registry, where the next layer finds it. An engine
    with ``quantization="fp8rl"`` raises for the same probe.
    """
    if name not in _OURS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    device, path = _OURS[name]
    backend = AttentionBackendEnum[name]
    if untested(device) is None or not failures({device}):
        register_backend(backend, path)
    else:
        backend.clear_override()
    return backend.get_class()

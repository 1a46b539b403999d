"""KV scales of an engine without a trainer: observed in forwards, sent by name, or set by hand.

Names load on first use: importing this package does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_fp8rl.calibration.calibrate import calibrate_kv_scales, send_kv_scales
    from vllm_fp8rl.quantization.kv_cache import set_uncalibrated_kv_scales

_HOME = {
    "calibrate_kv_scales": "vllm_fp8rl.calibration.calibrate",
    "send_kv_scales": "vllm_fp8rl.calibration.calibrate",
    "set_uncalibrated_kv_scales": "vllm_fp8rl.quantization.kv_cache",
}

__all__ = ["calibrate_kv_scales", "send_kv_scales", "set_uncalibrated_kv_scales"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

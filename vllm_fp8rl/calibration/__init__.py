"""KV scales found by the engine itself: amax observed in forwards, scales for every request after.

Names load on first use: importing this package does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_fp8rl.calibration.calibrate import calibrate_kv_scales, send_kv_scales

__all__ = ["calibrate_kv_scales", "send_kv_scales"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.calibrate"), name)

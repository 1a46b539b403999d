"""KV scales of an engine without a trainer: observed in forwards, sent by name, or set by hand.

Importing this package does not import vLLM.
"""

from vllm_fp8rl.calibration.calibrate import (
    calibrate_kv_scales,
    send_kv_scales,
    set_uncalibrated_kv_scales,
)

__all__ = ["calibrate_kv_scales", "send_kv_scales", "set_uncalibrated_kv_scales"]

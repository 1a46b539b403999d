"""Reports of runs that were never made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SPEEDS = {"bf16": 100.0, "stock-kv": 136.0, "fp8rl-kv": 170.0, "fp8rl-int8": 165.0, "fp8rl": 118.0}
KL = {"bf16": 0.002, "stock-kv": 0.04, "fp8rl-kv": 0.0224, "fp8rl-int8": 0.019, "fp8rl": 0.018}


def report(
    *,
    speeds: Mapping[str, float | list[float]] = SPEEDS,
    kl: dict[str, float] = KL,
    errors: dict[str, float] | None = None,
    layer: tuple[float, float] = (10.0, 8.0),
    random: bool = False,
    device: str = "NVIDIA H100",
    failed: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A report with a row for each speed, and a trainer's mismatch of each KL."""
    rows = {
        name: {
            "failed": {},
            "start_seconds": 40.0,
            "weight_bytes": 16 << 30 if name == "bf16" else 9 << 30,
            "cache_bytes_per_token": 1024.0 * (144 if name in ("bf16", "fp8rl") else 72),
            "cache_tokens": 400_000,
            "tokens_per_second": speed if isinstance(speed, list) else [speed, speed],
            "engines": {"kl_k3": 0.001},
        }
        for name, speed in speeds.items()
    }
    found = {
        name: {
            "tokens": 30_000,
            "kl_k3": value,
            "token_mult_prob_error": math.inf,  # one outlier: the gate is on the capped mean
            "capped_prob_error": (errors or {}).get(name, 1.05),
        }
        for name, value in ({} if random else kl).items()
    }
    if failed:
        rows["fp8rl-exact"] = {"failed": failed}
    return {
        "model": "some/model",
        "random": random,
        "device": device,
        "load": "256x512x1024",
        "seconds": 599,
        "versions": {"torch": "9.8.7"},
        "variants": rows,
        "training": {
            "failed": {},
            "tokens": 8192,
            "layer": {"BF16": layer[0], "fp8rl": layer[1] / 2, "fp8rl, FP8 K and V": layer[1]},
            "trainer": found,
            "bf16_trainer": found,
        },
        "advice": "Do <this>.",
        "recipe": {"kv_cache": {"dtype": "auto"}},
    }

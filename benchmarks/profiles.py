"""Profile one call, by GPU kernel or by Python function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def by_kernel(load: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds of GPU time of one load, by kind of kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        load()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        kinds = ("quantize", "finite", "Memcpy", "Memset")
        kind = next((k for k in kinds if k in event.key), "other")
        found[kind] = found.get(kind, 0.0) + event.self_device_time_total / 1e3
    return {kind: round(value, 3) for kind, value in found.items()}


def by_function(load: Callable[[], object], count: int = 30) -> dict[str, list[float]]:
    """Return milliseconds of host time of one load by function: cumulative, and its own."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    profiler.runcall(load)
    rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    top = sorted(rows, key=lambda row: -row[1][3])[:count]
    return {
        f"{Path(file).name}:{line}:{name}": [round(1e3 * stats[3], 2), round(1e3 * stats[2], 2)]
        for (file, line, name), stats in top
    }

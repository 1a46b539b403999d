"""Measure and profile one call, by GPU kernel or by Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def cold_ms(call: Callable[[], object]) -> float:
    """Return the median milliseconds of single calls with a cold L2 cache."""
    from triton.testing import do_bench

    return do_bench(call, return_mode="median")


def copy_bandwidth() -> float:
    """Return the GB/s of a device-to-device copy, counting reads and writes."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / cold_ms(lambda: target.copy_(source)) / 1e6


def by_kernel(load: Callable[[], object]) -> dict[str, float]:
    """Return milliseconds of GPU time of one load, by kind of kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        load()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profiler.key_averages():
        kinds = ("multi_tensor", "quantize", "finite", "Memcpy", "Memset")
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


@contextmanager
def compiled_kernels() -> Iterator[dict[str, float]]:
    """Collect the seconds in which Triton compiles a kernel, by its name; files on disk count 0."""
    from triton import knobs

    found: dict[str, float] = {}
    before = knobs.compilation.listener

    def heard(**told: Any) -> None:
        if before is not None:
            before(**told)
        if not told["cache_hit"]:
            name = told["metadata"]["name"]
            found[name] = found.get(name, 0.0) + told["times"].total / 1e6

    knobs.compilation.listener = heard
    try:
        yield found
    finally:
        knobs.compilation.listener = before

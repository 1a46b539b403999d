"""Measure and profile one call, by GPU kernel or by Python function."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple


class Collection(NamedTuple):
    """A collection of Python's garbage collector."""

    generation: int
    seconds: float
    freed: int


@contextmanager
def garbage_collections() -> Iterator[list[Collection]]:
    """Yield a list to which each garbage collection of the block is added."""
    seen: list[Collection] = []
    begun = [0.0]

    def collected(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            took = time.perf_counter() - begun[0]
            seen.append(Collection(info["generation"], took, info["collected"]))

    gc.callbacks.append(collected)
    try:
        yield seen
    finally:
        gc.callbacks.remove(collected)


def cold_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of single calls with a cold L2 cache."""
    import torch

    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # several times any L2 cache
    for _ in range(3):
        call()
    return _median_ms(call, repeats, before=flush.zero_)


def graph_ms(call: Callable[[], object], launches: int, repeats: int) -> float:
    """Return the median milliseconds of a call in a CUDA graph of ``launches`` of them."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    return _median_ms(graph.replay, repeats) / launches


def _median_ms(
    call: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None
) -> float:
    """Return the median milliseconds of the GPU for a call, without what is done before each."""
    import torch

    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def copy_bandwidth(repeats: int) -> float:
    """Return the GB/s of a device-to-device copy, counting reads and writes."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / cold_ms(lambda: target.copy_(source), repeats) / 1e6


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

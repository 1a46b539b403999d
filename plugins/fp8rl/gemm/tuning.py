"""Time GEMM backends on the shapes of a model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape
from fp8rl.numerics import FP8_DTYPE, GROUP, Quantized, cdiv

_WARM_UP, _REPEATS = 2, 7
_CALLS = 5  # between two events, so that the GPU does not wait for the host's work of a call


def flops(shape: GemmShape) -> int:
    """Of one direction."""
    return 2 * shape.tokens * shape.out_features * shape.in_features


def measure(
    backends: Sequence[GemmBackend],
    direction: Direction,
    shape: GemmShape,
    device: torch.device,
) -> dict[str, float]:
    """Median milliseconds of each backend that can do it, by name, over operands made up here.

    The operands are random, because zeros draw less power and so run faster. The first call, which
    may compile, is not counted. A backend that raises is left out.
    """
    a, b = _operands(direction, shape, device)
    out = None
    if direction == "wgrad_add":
        out = torch.zeros(shape.out_features, shape.in_features, device=device)
    times = {
        backend.name: _median(backend, direction, a, b, shape.dtype, out) for backend in backends
    }
    return {name: milliseconds for name, milliseconds in times.items() if milliseconds is not None}


def run(
    backend: GemmBackend,
    direction: Direction,
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One product of ``backend``; ``out`` is for ``wgrad_add``."""
    if direction == "fprop":
        return backend.fprop(a, b, dtype)
    if direction == "dgrad":
        return backend.dgrad(a, b, dtype)
    return backend.wgrad(a, b, dtype if out is None else out.dtype, out)


def _median(
    backend: GemmBackend,
    direction: Direction,
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    out: torch.Tensor | None,
) -> float | None:
    try:
        for _ in range(_WARM_UP):
            run(backend, direction, a, b, dtype, out)
        times = [
            _milliseconds(lambda: run(backend, direction, a, b, dtype, out), a.codes.device)
            for _ in range(_REPEATS)
        ]
    except torch.OutOfMemoryError:
        raise
    except (
        Exception
    ):  # a compiler, a library or an argument check: whatever it is, do not choose it
        return None
    return statistics.median(times)


def _milliseconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        call()
        return (time.perf_counter() - begun) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _CALLS


def _operands(
    direction: Direction, shape: GemmShape, device: torch.device
) -> tuple[Quantized, Quantized]:
    # A generator of its own: a model that is trained meanwhile must not lose random numbers.
    generator = torch.Generator(device).manual_seed(0)

    def codes(rows: int, cols: int) -> torch.Tensor:
        raw = torch.randint(
            0, 256, (rows, cols), dtype=torch.uint8, device=device, generator=generator
        )
        return raw.masked_fill_(raw & 0x7F == 0x7F, 0).view(FP8_DTYPE)  # the two NaNs

    def groups(rows: int, cols: int) -> Quantized:
        size = (cdiv(cols, GROUP), cdiv(rows, 4) * 4)
        scale_inv = torch.rand(size, device=device, generator=generator) * 1e-3
        return Quantized(codes(rows, cols), scale_inv[:, :rows].t())

    def blocks(rows: int, cols: int) -> Quantized:
        size = (cdiv(rows, GROUP), cdiv(cols, GROUP))
        scale_inv = torch.rand(size, device=device, generator=generator) * 1e-3
        return Quantized(codes(rows, cols), scale_inv)

    tokens, out_features, in_features, _ = shape
    if direction == "fprop":
        return groups(tokens, in_features), blocks(out_features, in_features)
    if direction == "dgrad":
        return groups(tokens, out_features), blocks(in_features, out_features)
    padded = cdiv(tokens, GROUP) * GROUP
    return groups(out_features, padded), groups(in_features, padded)

"""Time GEMM backends on the shapes of a model."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.numerics import (
    FP8_DTYPE,
    GROUP,
    ExpertRows,
    GroupedColumns,
    GroupedRows,
    Quantized,
    cdiv,
    row_alignment,
)

logger = logging.getLogger(__name__)

_WARM_UP, _REPEATS = 2, 7
_CALLS = 5  # between two events, so that the GPU does not wait for the host's work of a call


def flops(shape: GemmShape | GroupedShape) -> int:
    """Of one direction; of experts with their padding."""
    return 2 * shape.tokens * shape.out_features * shape.in_features


def measure(
    backends: Sequence[GemmBackend] | Sequence[GroupedBackend],
    direction: Direction,
    shape: GemmShape | GroupedShape,
    device: torch.device,
) -> dict[str, float]:
    """Median milliseconds of each backend that can do it, by name, over operands made up here.

    The operands are random, because zeros draw less power and so run faster. The first call, which
    may compile, is not counted. A backend that raises is left out, with a warning in the log.
    """
    calls = _calls(backends, direction, shape, device)
    times = {name: _median(name, call, device) for name, call in calls.items()}
    return {name: milliseconds for name, milliseconds in times.items() if milliseconds is not None}


def _calls(
    backends: Sequence[GemmBackend] | Sequence[GroupedBackend],
    direction: Direction,
    shape: GemmShape | GroupedShape,
    device: torch.device,
) -> dict[str, Callable[[], object]]:
    a, b, out = operands(direction, shape, device)
    product: Callable = run_grouped if isinstance(shape, GroupedShape) else run
    return {
        backend.name: partial(product, backend, direction, a, b, shape.dtype, out)
        for backend in backends
    }


def operands(
    direction: Direction, shape: GemmShape | GroupedShape, device: torch.device
) -> tuple[Any, Any, Any]:
    """Random operands of one product, as :func:`run` and :func:`run_grouped` take them, and for
    ``wgrad_add`` zeros to add to."""
    if isinstance(shape, GroupedShape):
        stack = (len(shape.sizes), shape.out_features, shape.in_features)
        out = torch.zeros(stack, device=device).unbind() if direction == "wgrad_add" else None
        return *_grouped_operands(direction, shape, device), out
    single = None
    if direction == "wgrad_add":
        single = torch.zeros(shape.out_features, shape.in_features, device=device)
    return *_operands(direction, shape, device), single


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


def run_grouped(
    backend: GroupedBackend,
    direction: Direction,
    a: GroupedRows | GroupedColumns,
    b: Quantized | GroupedColumns,
    dtype: torch.dtype,
    out: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor | Sequence[torch.Tensor]:
    """:func:`run` for experts."""
    if isinstance(a, GroupedColumns):
        assert isinstance(b, GroupedColumns)
        return backend.grouped_wgrad(a, b, dtype if out is None else out[0].dtype, out)
    assert isinstance(b, Quantized)
    if direction == "fprop":
        return backend.grouped_fprop(a, b, dtype)
    return backend.grouped_dgrad(a, b, dtype)


def _median(name: str, call: Callable[[], object], device: torch.device) -> float | None:
    try:
        for _ in range(_WARM_UP):
            call()
        times = [_milliseconds(call, device) for _ in range(_REPEATS)]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, a library or an argument check
        logger.warning("fp8rl: GEMM backend '%s' failed while it was timed: %s", name, error)
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


class _Random:
    """Operands of random codes. It has a generator of its own: a model that is trained meanwhile
    must not lose random numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def codes(self, *shape: int) -> torch.Tensor:
        raw = torch.randint(
            0, 256, shape, dtype=torch.uint8, device=self._device, generator=self._generator
        )
        return raw.masked_fill_(raw & 0x7F == 0x7F, 0).view(FP8_DTYPE)  # the two NaNs

    def scales(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self._device, generator=self._generator) * 1e-3

    def groups(self, rows: int, cols: int) -> Quantized:
        scale_inv = self.scales(cdiv(cols, GROUP), cdiv(rows, 4) * 4)
        return Quantized(self.codes(rows, cols), scale_inv[:, :rows].t())

    def blocks(self, *shape: int) -> Quantized:
        *stack, rows, cols = shape
        grid = self.scales(*stack, cdiv(rows, GROUP), cdiv(cols, GROUP))
        return Quantized(self.codes(*shape), grid)


def _operands(
    direction: Direction, shape: GemmShape, device: torch.device
) -> tuple[Quantized, Quantized]:
    random = _Random(device)
    tokens, out_features, in_features, _ = shape
    if direction == "fprop":
        return random.groups(tokens, in_features), random.blocks(out_features, in_features)
    if direction == "dgrad":
        return random.groups(tokens, out_features), random.blocks(in_features, out_features)
    padded = cdiv(tokens, GROUP) * GROUP
    return random.groups(out_features, padded), random.groups(in_features, padded)


def _grouped_operands(
    direction: Direction, shape: GroupedShape, device: torch.device
) -> tuple[GroupedRows | GroupedColumns, Quantized | GroupedColumns]:
    random = _Random(device)
    expert_rows = ExpertRows(shape.sizes, row_alignment(device))
    experts, out_features, in_features = len(shape.sizes), shape.out_features, shape.in_features

    def columns(features: int) -> GroupedColumns:
        scale_inv = random.scales(expert_rows.group_starts[-1], features)
        return GroupedColumns(random.codes(shape.tokens * features), scale_inv, expert_rows)

    if direction == "fprop":
        x = random.groups(shape.tokens, in_features)
        return GroupedRows(*x, expert_rows), random.blocks(experts, out_features, in_features)
    if direction == "dgrad":
        grad = random.groups(shape.tokens, out_features)
        return GroupedRows(*grad, expert_rows), random.blocks(experts, in_features, out_features)
    return columns(out_features), columns(in_features)

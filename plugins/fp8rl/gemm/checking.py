"""Check a product of a backend against float64 before it is trusted.

Kernels of others come in many versions, each with its own idea of how scales lie in memory, and one
that reads them from the wrong place trains badly instead of failing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8rl.gemm.backend import Direction, GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.gemm.tuning import operands, run, run_grouped
from fp8rl.numerics import BLOCK, GROUP, GroupedColumns, Quantized

# Bfloat16 rounds by 2e-3, and Hopper's tensor cores keep 14 bits of what they add.
_TOLERANCE = 1e-2
_SAMPLED = 64  # rows and columns of each product that are computed again


def fault(
    backend: GemmBackend | GroupedBackend,
    direction: Direction,
    shape: GemmShape | GroupedShape,
    device: torch.device,
) -> str | None:
    """What is wrong with a product of this shape, over operands made up here; None if it is right.

    Waits for the device. ``wgrad_add`` is called twice, so that a backend that does not add is
    found out. Every expert is looked at.
    """
    a, b, out = operands(direction, shape, device)
    product: Any = run_grouped if isinstance(shape, GroupedShape) else run
    times = 2 if direction == "wgrad_add" else 1
    try:
        for _ in range(times):
            result = product(backend, direction, a, b, shape.dtype, out)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler, a library or an argument check
        return f"failed when it was tried ({type(error).__name__}: {error})"
    blocks = direction in ("fprop", "dgrad")
    total, off = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for left, right, got in _parts(a, b, result):
        rows, cols = _sample(len(left.codes), device), _sample(len(right.codes), device)
        truth = times * _exact(left, rows, 1) @ _exact(right, cols, BLOCK[0] if blocks else 1).t()
        total += truth.square().sum()
        off += (got[rows][:, cols] - truth).square().sum()
    relative = float((off / total).sqrt())
    if relative <= _TOLERANCE:
        return None
    return f"its product was off by {relative:.2g}, relative to the same in float64"


def _parts(a: Any, b: Any, result: Any) -> Iterator[tuple[Quantized, Quantized, torch.Tensor]]:
    """Operands and result of each expert, or of all there is."""
    if isinstance(a, Quantized):
        yield a, b, result
        return
    expert_rows = a.expert_rows
    if isinstance(a, GroupedColumns):
        for position in range(len(expert_rows.order)):
            yield a.at(position), b.at(position), result[position]
        return
    for expert, (start, size) in enumerate(zip(expert_rows.starts, expert_rows.sizes, strict=True)):
        of_expert = Quantized(b.codes[expert], b.scale_inv[expert])
        yield a.of(expert), of_expert, result[start : start + size]


def _sample(count: int, device: torch.device) -> torch.Tensor:
    """Numbers of rows, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, _SAMPLED), device=device).long()


def _exact(side: Quantized, rows: torch.Tensor, height: int) -> torch.Tensor:
    """Rows of an operand in float64; ``height`` rows have one scale."""
    codes = side.codes.view(torch.uint8)[rows].view(side.codes.dtype).double()
    scale_inv = side.scale_inv[rows // height].double()
    return codes * scale_inv.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]

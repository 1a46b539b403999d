"""Compare the products of a GEMM backend with float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8rl.gemm import Direction, GemmShape, GroupedShape
from fp8rl.numerics import (
    BLOCK,
    GROUP,
    ExpertRows,
    GroupedColumns,
    Quantized,
    quantize_grouped,
    quantize_operand,
    quantize_weight,
    quantize_weights,
    row_alignment,
)


def product_error(
    backend: Any, direction: Direction, shape: GemmShape | GroupedShape, device: torch.device
) -> float:
    """Return the relative error of one product over random operands; NaN if the result has any.

    ``wgrad_add`` is called twice, so that a backend that does not add is found. All rows of every
    expert count. A right product on a Hopper GPU is off by less than 0.01: BF16 rounds by 0.002,
    and the tensor cores keep 14 bits of what they add.
    """
    a, b, out = operands(direction, shape, device)
    times = 2 if direction == "wgrad_add" else 1
    for _ in range(times):
        result = _product(backend, direction, a, b, shape.dtype, out)
    height = BLOCK[0] if direction in ("fprop", "dgrad") else 1
    total, off = torch.zeros(2, dtype=torch.float64, device=device).unbind()
    for left, right, got in _parts(a, b, result):
        truth = times * _exact(left, 1) @ _exact(right, height).t()
        total += truth.square().sum()
        off += (got - truth).square().sum()
    return float((off / total).sqrt())


def operands(
    direction: Direction, shape: GemmShape | GroupedShape, device: torch.device
) -> tuple[Any, Any, Any]:
    """Make both operands of one product, and zeros to add to for ``wgrad_add``.

    Returns:
        As :class:`fp8rl.gemm.GemmBackend` takes them, or :class:`fp8rl.gemm.GroupedBackend` for a
        :class:`GroupedShape`; codes are contiguous, as on a GPU.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, device=device).to(torch.bfloat16)

    tokens, outs, ins = shape.tokens, shape.out_features, shape.in_features
    out: Any = None
    if isinstance(shape, GroupedShape):
        expert_rows, experts = ExpertRows(shape.sizes, row_alignment(device)), len(shape.sizes)
        x, grad = (quantize_grouped(random(tokens, n), expert_rows) for n in (ins, outs))
        w = quantize_weights([random(outs, ins) for _ in range(experts)])
        sides = _sides(direction, x, grad, w)
        if direction == "wgrad_add":
            out = torch.zeros(experts, outs, ins, device=device).unbind()
        a, b = sides
        if direction in ("fprop", "dgrad"):
            b = Quantized(b.codes.contiguous(), b.scale_inv.contiguous())
        return a, b, out
    single_x, single_grad = (quantize_operand(random(tokens, n)) for n in (ins, outs))
    sides = _sides(direction, single_x, single_grad, quantize_weight(random(outs, ins)))
    if direction == "wgrad_add":
        out = torch.zeros(outs, ins, device=device)
    a, b = (Quantized(side.codes.contiguous(), side.scale_inv) for side in sides)
    return a, b, out


def _sides(direction: Direction, x: Any, grad: Any, w: Any) -> tuple[Any, Any]:
    """Each argument is a pair: the rowwise and the columnwise operand."""
    if direction == "fprop":
        return x[0], w[0]
    return (grad[0], w[1]) if direction == "dgrad" else (grad[1], x[1])


def _product(
    backend: Any, direction: Direction, a: Any, b: Any, dtype: torch.dtype, out: Any
) -> Any:
    name = "wgrad" if direction == "wgrad_add" else direction
    grouped = not isinstance(a, Quantized)
    product = getattr(backend, f"grouped_{name}" if grouped else name)
    if name != "wgrad":
        return product(a, b, dtype)
    if out is not None:
        dtype = torch.float32
    return product(a, b, dtype, out)


def _parts(a: Any, b: Any, result: Any) -> Iterator[tuple[Quantized, Quantized, torch.Tensor]]:
    """Operands and result of each expert, or of the one product."""
    if isinstance(a, Quantized):
        yield a, b, result
        return
    expert_rows = a.expert_rows
    if isinstance(a, GroupedColumns):
        for position in range(len(expert_rows.order)):
            yield a.at(position), b.at(position), result[position]
        return
    for expert, (start, size) in enumerate(
        zip(expert_rows.starts, expert_rows.splits, strict=True)
    ):
        weight = Quantized(b.codes[expert], b.scale_inv[expert])
        yield a.of(expert), weight, result[start : start + size]


def _exact(side: Quantized, height: int) -> torch.Tensor:
    """Dequantize in float64; ``height`` rows share one scale."""
    codes = side.codes.view(torch.uint8).view(side.codes.dtype).double()
    scale_inv = side.scale_inv.double().repeat_interleave(height, 0)[: len(codes)]
    return codes * scale_inv.repeat_interleave(GROUP, 1)[:, : codes.shape[1]]

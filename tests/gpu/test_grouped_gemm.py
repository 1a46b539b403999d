"""Grouped products of experts on a GPU against float64, with ragged and empty runs."""

from __future__ import annotations

import pytest
import torch

from fp8rl.gemm import GroupedShape, builtin_backends
from fp8rl.numerics import (
    ExpertRows,
    GroupedRows,
    Quantized,
    quantize_grouped,
    quantize_weights,
    row_alignment,
)
from support.numeric import relative_error
from support.shapes import SPLITS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cuda")
ALIGNMENT = row_alignment(DEVICE)
FLOAT32, BFLOAT16 = 2e-3, 2**-8  # as in test_gemm_backends.py
OUT, IN = 256, 640
GROUPED = {b.name: b for b in builtin_backends() if hasattr(b, "grouped_fprop")}


def _exact(q: Quantized, blocks: bool = False) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    if blocks:
        factors = factors.repeat_interleave(128, 0)[: len(q.codes)]
    return q.codes.double() * factors


def _of_rows(a: GroupedRows, w: Quantized) -> torch.Tensor:
    experts = range(len(a.expert_rows.splits))
    stack = [Quantized(w.codes[e], w.scale_inv[e]) for e in experts]
    return torch.cat([_exact(a.of(e)) @ _exact(stack[e], True).t() for e in experts])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_every_direction(name, splits):
    backend = GROUPED[name]
    order = list(reversed(range(len(splits))))
    expert_rows = ExpertRows(splits, ALIGNMENT, order)
    shape = GroupedShape(tuple(splits), OUT, IN)
    reason = backend.supports_grouped(DEVICE, shape, "fp32")
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    torch.manual_seed(0)
    x = torch.randn(sum(splits), IN, device=DEVICE).bfloat16()
    grad = (torch.randn(sum(splits), OUT, device=DEVICE) * 1e-5).bfloat16()
    weights = [torch.randn(OUT, IN, device=DEVICE).bfloat16() for _ in splits]
    by_rows, by_columns = quantize_grouped(x, expert_rows)
    grad_rows, grad_columns = quantize_grouped(grad, expert_rows)
    w, w_t = quantize_weights(weights)
    y = backend.grouped_fprop(by_rows, w, torch.bfloat16)
    assert relative_error(y, _of_rows(by_rows, w)) < BFLOAT16
    dx = backend.grouped_dgrad(grad_rows, w_t, torch.bfloat16)
    assert relative_error(dx, _of_rows(grad_rows, w_t)) < BFLOAT16

    dw = [_exact(grad_columns.at(p)) @ _exact(by_columns.at(p)).t() for p in range(len(order))]
    for dtype, tolerance in ((torch.bfloat16, BFLOAT16), (torch.float32, FLOAT32)):
        for got, expected in zip(
            backend.grouped_wgrad(grad_columns, by_columns, dtype), dw, strict=True
        ):
            assert got.dtype == dtype
            _near(got, expected, tolerance)
        for memory in (_apart, _together):
            totals = memory([3 * d.to(dtype) for d in dw])
            backend.grouped_wgrad(grad_columns, by_columns, dtype, totals)
            for total, expected in zip(totals, dw, strict=True):
                _near(total, 4 * expected, tolerance)


def _near(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if expected.any():
        assert relative_error(got, expected) < tolerance
    else:
        assert not got.any()


def _apart(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    return [m.clone() for m in matrices]


def _together(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
    """Behind something else, as gradients are in megatron's buffers."""
    buffer = torch.cat([matrices[0].new_zeros(64), *(m.flatten() for m in matrices)])
    return list(buffer[64:].view(len(matrices), *matrices[0].shape).unbind())


@pytest.mark.parametrize("name", GROUPED)
def test_a_nan_shows_in_its_row_alone(name):
    expert_rows = ExpertRows((100, 0, 200, 0, 0), ALIGNMENT)
    if GROUPED[name].supports_grouped(DEVICE, GroupedShape(expert_rows.splits, OUT, IN), "fp32"):
        pytest.skip(f"{name} does not serve this")
    torch.manual_seed(0)
    x = torch.randn(300, IN, device=DEVICE).bfloat16()
    x[117, 5] = torch.inf
    rows, _ = quantize_grouped(x, expert_rows, columnwise=False)
    weights = [torch.randn(OUT, IN, device=DEVICE).bfloat16() for _ in range(5)]
    w, _ = quantize_weights(weights, columnwise=False)
    y = GROUPED[name].grouped_fprop(rows, w, torch.bfloat16)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [117]
    assert y.isnan().any(1).sum() == 1

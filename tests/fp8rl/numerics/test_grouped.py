"""Rows of many experts: codes of each as if it were alone, and where its tiles lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics import (
    Addresses,
    ExpertRows,
    GroupedColumns,
    GroupedRows,
    Quantized,
    place_boundaries,
    reference,
)
from support.devices import assert_same
from support.shapes import SPLITS

CPU = torch.device("cpu")
quick = settings(max_examples=25)


def check(
    rows: GroupedRows, columns: GroupedColumns | None, x: torch.Tensor, scale_format: str
) -> None:
    """Codes and scales of every expert, and of its rows that come once more in a tile of one."""
    expert_rows = rows.expert_rows
    for expert, run in enumerate(x.split(list(expert_rows.splits))):
        alone = reference.quantize_operand(run, scale_format, True, True)
        assert_same(rows.of(expert), alone.rowwise)
        if columns is not None and expert in expert_rows.order:
            assert_same(columns.at(expert_rows.order.index(expert)), alone.columnwise)
    for _, start, n, place in expert_rows.boundaries:
        one, other = (
            Quantized(rows.codes[at : at + n], rows.scale_inv[at : at + n]) for at in (start, place)
        )
        assert_same(one, other)


@pytest.mark.parametrize(
    ("splits", "cols", "order", "dtype"),
    [
        (SPLITS[0], 256, None, torch.bfloat16),
        (SPLITS[1], 200, "backwards", torch.bfloat16),
        (SPLITS[2], 200, None, torch.float32),
        (SPLITS[3], 256, "backwards", torch.float32),
    ],
    ids=str,
)
def test_each_expert_has_the_codes_it_would_have_alone(device, splits, cols, order, dtype):
    torch.manual_seed(0)
    x = torch.randn(sum(splits), cols).mul(torch.rand(cols).mul(6).exp()).to(dtype)
    x[0, 3] = torch.inf
    left_out = [e for e in reversed(range(len(splits))) if e != 1] if order else None
    kernels = device.module("grouped")
    expert_rows = ExpertRows(splits, kernels.ALIGNMENT, left_out)
    there = x.to(device.at)
    check(*kernels.quantize_grouped(there, expert_rows, "fp32", True, True), x, "fp32")
    check(*kernels.quantize_grouped(there, expert_rows, "pow2", True, False), x, "pow2")
    y = torch.randn(expert_rows.rows, cols, device=device.at)
    expected = y.clone()
    reference.place_boundaries(expected, expert_rows)
    placed = place_boundaries(y, expert_rows)
    assert torch.equal(placed, expected[: sum(splits)])


@pytest.mark.parametrize(
    ("shape", "dtype"), [((256, 384), torch.bfloat16), ((200, 130), torch.float32)]
)
def test_a_stack_has_the_codes_of_each_weight(device, shape, dtype):
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) for _ in range(3)]
    weights[1][5, 7] = torch.nan
    alone = [reference.quantize_weight(w, "fp32", True, True) for w in weights]
    known, there = Addresses(), [w.to(device.at, copy=True) for w in weights]
    moved = [w.clone() for w in there]
    for at in (there, there, moved):
        for w in (w for w in there if at is moved):
            w.zero_()  # an old address would show
        made = device.module("grouped").quantize_weights(at, "fp32", True, True, known)
        for expert, operand in enumerate(alone):
            for got, side in zip(made, operand, strict=True):
                assert_same(Quantized(got.codes[expert], got.scale_inv[expert]), side)


@quick
@given(st.lists(st.sampled_from([0, 1, 5, 127, 128, 129, 256, 300]), min_size=1, max_size=9))
def test_a_product_by_tiles_is_that_of_each_expert(splits):
    """Each tile is multiplied by one expert's number, then boundary tiles go to their places."""
    expert_rows = ExpertRows(splits, 128)
    source = torch.arange(1.0, sum(splits) + 1)[:, None]
    operand = torch.full((expert_rows.rows, 1), torch.nan)
    for first, rows, place, *_ in expert_rows.table(CPU).tolist():
        operand[place : place + rows] = source[first : first + rows]
    owners = expert_rows.experts(CPU)
    assert len(owners) == expert_rows.rows and owners.is_contiguous()
    assert all(tile.unique().numel() == 1 for tile in owners.view(-1, 128))
    y = place_boundaries(operand * (owners[:, None] + 1), expert_rows)
    runs = source.split(splits)
    assert torch.equal(y, torch.cat([run * (e + 1) for e, run in enumerate(runs)]))
    assert not y._is_view()  # autograd lets nobody change a view of a custom function in place

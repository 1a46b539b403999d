"""Operands of many experts, and the reference's products, against each expert alone and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import (
    GroupedBackend,
    GroupedShape,
    ReferenceBackend,
)
from fp8rl.gemm.deep_gemm import _stacks
from fp8rl.numerics import (
    Addresses,
    ExpertRows,
    LastExpertRows,
    Quantized,
    place_boundaries,
    quantize_grouped,
    quantize_operand,
    quantize_weight,
    quantize_weights,
    row_alignment,
)
from fp8rl.testing.numeric import relative_error

CPU = torch.device("cpu")
OUT, IN = 136, 200
runs = st.lists(st.integers(0, 150), min_size=1, max_size=4)
orders = st.randoms(use_true_random=False)
quick = settings(max_examples=25, deadline=None)


def _same(a: Quantized, b: Quantized) -> None:
    assert torch.equal(
        a.codes.contiguous().view(torch.uint8), b.codes.contiguous().view(torch.uint8)
    )
    assert torch.equal(a.scale_inv, b.scale_inv)


def _exact(q: Quantized, blocks: bool = False) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    if blocks:
        factors = factors.repeat_interleave(128, 0)[: len(q.codes)]
    return q.codes.double() * factors


def _at(stack: Quantized, expert: int) -> Quantized:
    return Quantized(stack.codes[expert], stack.scale_inv[expert])


@quick
@given(runs, orders, st.sampled_from(["fp32", "pow2"]))
def test_each_part_is_that_of_the_expert_alone(splits, random, scale_format):
    torch.manual_seed(sum(splits))
    x = torch.randn(sum(splits), IN, dtype=torch.bfloat16)
    order = random.sample(range(len(splits)), random.randint(0, len(splits)))
    expert_rows = ExpertRows(splits, row_alignment(CPU), order)
    rows, columns = quantize_grouped(x, expert_rows, scale_format)
    assert rows is not None and columns is not None
    for expert, run in enumerate(x.split(splits)):
        alone = quantize_operand(run, scale_format)
        _same(rows.of(expert), alone.rowwise)
        if expert in order:
            _same(columns.at(order.index(expert)), alone.columnwise)
    assert expert_rows.rows == len(x) and torch.equal(place_boundaries(x, expert_rows), x)
    assert quantize_grouped(x, expert_rows, rowwise=False, columnwise=False) == (None, None)


def test_a_stack_is_that_of_each_weight():
    weights = [torch.randn(OUT, IN) for _ in range(3)]
    weights[2][0, 0] = torch.inf
    rowwise, columnwise = quantize_weights(weights, "pow2")
    for expert, weight in enumerate(weights):
        alone = quantize_weight(weight, "pow2")
        _same(_at(rowwise, expert), alone.rowwise)
        _same(_at(columnwise, expert), alone.columnwise)
    with pytest.raises(UnsupportedError, match="must have one shape"):
        quantize_weights([weights[0], weights[1][:5]])


@quick
@given(runs, orders)
def test_the_reference_gives_products_of_each_expert(splits, random):
    """Against float64; a columnwise operand may hold the experts in any order, or some of them."""
    backend = ReferenceBackend()
    assert isinstance(backend, GroupedBackend)
    shape = GroupedShape(tuple(splits), OUT, IN, torch.float32)
    assert backend.supports_grouped(CPU, shape, "fp32") is None
    torch.manual_seed(sum(splits))
    order = random.sample(range(len(splits)), random.randint(1, len(splits)))
    expert_rows = ExpertRows(splits, 1, order)
    x, x_t = quantize_grouped(torch.randn(sum(splits), IN), expert_rows)
    grad, grad_t = quantize_grouped(torch.randn(sum(splits), OUT), expert_rows)
    w, w_t = quantize_weights([torch.randn(OUT, IN) for _ in splits])
    every = range(len(splits))
    y = torch.cat([_exact(x.of(e)) @ _exact(_at(w, e), True).t() for e in every])
    dx = torch.cat([_exact(grad.of(e)) @ _exact(_at(w_t, e), True).t() for e in every])
    for got, expected in (
        (backend.grouped_fprop(x, w, torch.float32), y),
        (backend.grouped_dgrad(grad, w_t, torch.float32), dx),
    ):
        assert got.shape == expected.shape
        assert not sum(splits) or relative_error(got, expected) < 1e-6
    totals = [torch.ones(OUT, IN) for _ in order]
    fresh = backend.grouped_wgrad(grad_t, x_t, torch.bfloat16)
    added = backend.grouped_wgrad(grad_t, x_t, torch.float32, totals)
    for position, expert in enumerate(order):
        dw = _exact(grad_t.at(position)) @ _exact(x_t.at(position)).t()
        assert added[position] is totals[position] and fresh[position].dtype == torch.bfloat16
        if splits[expert]:
            assert relative_error(totals[position] - 1, dw) < 1e-5
            assert relative_error(fresh[position], dw) < 4e-3
        else:
            assert torch.equal(totals[position], torch.ones(OUT, IN))
            assert not fresh[position].any()


def test_what_does_not_fit_is_refused():
    for order in ((0, 0), (2,), (-1,)):
        with pytest.raises(UnsupportedError, match="name each at most once"):
            ExpertRows((3, 4), 1, order)
    for expert_rows in (ExpertRows((3, 4), 1), ExpertRows((4, 4), 128)):
        with pytest.raises(UnsupportedError, match="8 rows on cpu do not fit expert_rows"):
            quantize_grouped(torch.randn(8, 4), expert_rows)
    with pytest.raises(
        UnsupportedError, match="aligned to 1; make ExpertRows with an alignment of"
    ):
        ExpertRows((200, 130), 1).table(CPU)


def test_tiles_tell_where_rows_come_from_and_go_to():
    expert_rows = ExpertRows((130, 0, 5, 256), 128, (3, 0))
    assert expert_rows.sizes == (256, 0, 128, 256) and expert_rows.starts == (0, 130, 130, 135)
    assert expert_rows.column_starts == (0, 256, 512)
    assert expert_rows.boundaries == ((2, 130, 5, 512), (3, 135, 121, 640))
    assert (expert_rows.tokens, expert_rows.first_boundary, expert_rows.rows) == (391, 512, 768)
    assert expert_rows.table(CPU).tolist() == [
        # source row, rows, row to write, first tile in columnwise memory, tiles there, number
        [0, 128, 0, 2, 2, 0],
        [128, 2, 128, 2, 2, 1],
        [130, 5, 130, 0, 0, 0],
        [135, 128, 135, 0, 2, 0],
        [263, 128, 263, 0, 2, 1],
        [130, 5, 512, 0, 0, 0],
        [135, 121, 640, 0, 0, 0],
    ]
    owners = [0, 0, 3, 3, 2, 3]
    assert expert_rows.experts(CPU).tolist() == [e for e in owners for _ in range(128)]
    assert expert_rows.column_sizes_on(CPU).tolist() == [256, 256]


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


def test_a_product_of_other_rows_is_refused():
    expert_rows = ExpertRows((3, 200), 128)
    assert expert_rows.rows == 384
    for y in (torch.ones(203, 4), torch.ones(384), torch.ones(4, 384).t()):
        with pytest.raises(UnsupportedError, match="does not fit 384 rows"):
            place_boundaries(y, expert_rows)


def test_gradients_that_follow_each_other_are_one_stack():
    buffer = torch.arange(5 * 8.0)
    a, b, c = buffer[8:32].view(3, 2, 4).unbind()
    other = torch.zeros(2, 4)
    found = _stacks([a, b, other, c, buffer[32:].view(2, 4)])
    assert [(first, len(stack)) for first, stack in found] == [(0, 2), (2, 1), (3, 2)]
    assert torch.equal(found[0][1], buffer[8:24].view(2, 2, 4))
    assert found[2][1].data_ptr() == c.data_ptr() and found[2][1].is_contiguous()
    assert [first for first, _ in _stacks([b, a])] == [0, 1]  # not in the order of memory
    assert [len(s) for _, s in _stacks([a.t(), b.t()])] == [1, 1]
    # Where TMA cannot write each is alone, and gets a sum made elsewhere.
    assert [len(s) for _, s in _stacks(buffer[7:31].view(3, 2, 4).unbind())] == [1, 1, 1]
    # Neighbours in memory, but each in a storage of its own.
    memory = bytearray(64)
    x, y = (torch.frombuffer(memory, dtype=torch.float32, count=8, offset=n) for n in (0, 32))
    assert y.data_ptr() == x.data_ptr() + 32
    assert [len(s) for _, s in _stacks([x.view(2, 4), y.view(2, 4)])] == [1, 1]


def test_linears_of_a_layer_share_their_rows():
    last = LastExpertRows()
    rows = last.of([3, 0, 5], 128, [2, 0])
    assert (rows.splits, rows.order) == ((3, 0, 5), (2, 0))
    assert last.of((3, 0, 5), 128, (2, 0)) is rows
    for other in (((3, 1, 4), 128, (2, 0)), ((3, 1, 4), 1, (2, 0)), ((3, 1, 4), 1, (0, 1, 2))):
        found = last.of(*other)
        assert (found.splits, found.alignment, found.order) == other


def test_rows_are_not_shared_between_streams():
    """Nothing would order the copy of a table on one stream before its kernels on another."""
    last, key = LastExpertRows(), ((3, 0, 5), 128, (2, 0))
    rows = last.of(*key, stream=7)
    assert last.of(*key, stream=7) is rows
    others = [last.of(*key, stream=stream) for stream in (8, 7)]
    assert rows not in others and others[0] is not others[1]


def test_addresses_are_copied_when_they_have_changed():
    known = Addresses()
    table = known.on_device([5, 2**40], CPU, 0)
    assert table.tolist() == [5, 2**40] and known.on_device([5, 2**40], CPU, 0) is table
    assert known.on_device([5, 7], CPU, 0).tolist() == [5, 7]
    assert known.on_device([5, 7], CPU, 1) is not known.on_device([5, 7], CPU, 0)

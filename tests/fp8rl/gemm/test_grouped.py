"""The reference's products of many experts against float64, and gradients in one buffer."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.gemm import GroupedBackend, GroupedShape, ReferenceBackend
from fp8rl.gemm.deep_gemm import _stacks
from fp8rl.numerics import ExpertRows, Quantized, quantize_grouped, quantize_weights
from support.numeric import relative_error

CPU = torch.device("cpu")
OUT, IN = 136, 200
runs = st.lists(st.integers(0, 150), min_size=1, max_size=4)
orders = st.randoms(use_true_random=False)
quick = settings(max_examples=25)


def _exact(q: Quantized, blocks: bool = False) -> torch.Tensor:
    factors = q.scale_inv.double().repeat_interleave(128, 1)[:, : q.codes.shape[1]]
    if blocks:
        factors = factors.repeat_interleave(128, 0)[: len(q.codes)]
    return q.codes.double() * factors


def _at(stack: Quantized, expert: int) -> Quantized:
    return Quantized(stack.codes[expert], stack.scale_inv[expert])


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

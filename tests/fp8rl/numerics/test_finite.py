"""`all_finite` and `quantize_blocks` on the CPU; the kernels are in tests/gpu."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import (
    BLOCK,
    FP8_DTYPE,
    Quantized,
    Stacked,
    all_finite,
    quantize_block,
    quantize_blocks,
)
from fp8rl.numerics.finite import largest_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32, FP8_DTYPE]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_all_finite_finds_the_tensors_with_a_bad_element(data):
    tensors, wanted = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        shape = data.draw(st.sampled_from([(), (0,), (7,), (3, 5), (600, 700), (2, 3, 4)]))
        dtype = data.draw(st.sampled_from(DTYPES))
        tensor = torch.ones(shape).to(dtype)
        bad = tensor.numel() > 0 and data.draw(st.booleans())
        if bad:
            values = [torch.nan] if dtype == FP8_DTYPE else [torch.nan, torch.inf, -torch.inf]
            place = data.draw(st.integers(0, tensor.numel() - 1))
            tensor.view(-1)[place] = data.draw(st.sampled_from(values))
        tensors.append(tensor.t() if tensor.ndim == 2 else tensor)
        wanted.append(not bad)
    assert all_finite(tensors) == wanted


@pytest.mark.filterwarnings("error")
def test_parameters_of_a_trainer_are_read_without_a_graph():
    """Torch warns where a value that has a gradient is made a number."""
    parameters = [torch.nn.Parameter(torch.full((2, 3), value)) for value in (1.0, torch.nan)]
    assert all_finite(parameters) == [True, False]


def test_the_largest_finite_values_are_finite():
    assert all_finite([torch.full((2,), torch.finfo(d).max, dtype=d) for d in DTYPES]) == [True] * 4


@pytest.mark.parametrize("limit", [1.0, 3e4, 65504.0, 3.2e38])
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_what_is_beyond_a_limit_passes_for_infinite(dtype, limit):
    """Numbers of 16 bits, and in float32 those beside the limit, against a comparison."""
    if dtype == torch.float32:
        at = torch.tensor(limit)
        numbers = torch.stack([at.nextafter(torch.tensor(to)) for to in (0.0, limit, torch.inf)])
    else:
        numbers = torch.arange(1 << 16).short().view(dtype)
    wanted = torch.isfinite(numbers) & (numbers.double().abs() <= limit)
    some = slice(None, None, 1 if dtype == torch.float32 else 257)
    assert all_finite(list(numbers[some]), limit) == wanted[some].tolist()
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    magnitudes = numbers.abs().view(kind)
    assert torch.equal(magnitudes <= largest_bits(dtype, limit), wanted)


def empty(rows: int, columns: int) -> Quantized:
    codes = torch.zeros(rows, columns, dtype=torch.uint8).view(FP8_DTYPE)
    return Quantized(codes, torch.zeros(-(-rows // 128), -(-columns // 128)))


def test_quantize_blocks_is_quantize_block_of_each():
    jobs = [(torch.randn(n, k), empty(n, k)) for n, k in ((130, 200), (5, 7), (130, 200))]
    quantize_blocks(jobs, scale_format="pow2")
    for w, out in jobs:
        want = quantize_block(w, scale_format="pow2")
        assert torch.equal(out.codes.view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(out.scale_inv, want.scale_inv)
    quantize_blocks([])


def test_quantize_blocks_writes_nothing_where_one_is_refused():
    good, bad = empty(4, 4), empty(3, 4)
    with pytest.raises(UnsupportedError):
        quantize_blocks([(torch.ones(4, 4), good), (torch.ones(4, 4), bad)])
    assert not good.codes.view(torch.uint8).any() and not good.scale_inv.any()


def empty_stack(count: int, rows: int, columns: int) -> Quantized:
    codes = torch.zeros(count, rows, columns, dtype=torch.uint8).view(FP8_DTYPE)
    return Quantized(codes, torch.zeros(count, -(-rows // 128), -(-columns // 128)))


def test_a_stack_takes_the_codes_of_each_weight():
    """In a part of a larger stack, as gate and up lie in vLLM's; other matrices stay."""
    whole = empty_stack(4, 256, 200)
    out = Quantized(whole.codes[:, 128:], whole.scale_inv[:, 1:])
    weights = [torch.randn(128, 200), torch.randn(128, 200).bfloat16(), torch.randn(200, 128).t()]
    job = (torch.randn(5, 7), empty(5, 7))
    quantize_blocks([job], BLOCK, "pow2", [Stacked(weights, out, [3, 0, 1])])
    for w, number in zip(weights, (3, 0, 1), strict=True):
        want = quantize_block(w, scale_format="pow2")
        assert torch.equal(out.codes[number].view(torch.uint8), want.codes.view(torch.uint8))
        assert torch.equal(out.scale_inv[number], want.scale_inv)
    assert not whole.codes[:, :128].view(torch.uint8).any() and not whole.scale_inv[:, 0].any()
    assert not whole.codes[2].view(torch.uint8).any() and not whole.scale_inv[2].any()
    assert job[1].scale_inv.all()


@pytest.mark.parametrize(
    ("weights", "at"),
    [
        ([torch.ones(4, 4)] * 2, [0, 2]),
        ([torch.ones(4, 4)] * 2, [-1, 0]),
        ([torch.ones(4, 4)] * 2, [0]),
        ([torch.ones(4, 4), torch.ones(4, 3)], [0, 1]),
        ([torch.ones(4, 4), torch.ones(4, 4).to(FP8_DTYPE)], [0, 1]),
    ],
)
def test_a_stack_that_does_not_fit_is_refused(weights, at):
    out = empty_stack(2, 4, 4)
    with pytest.raises(UnsupportedError):
        quantize_blocks([], BLOCK, "fp32", [Stacked(weights, out, at)])
    assert not out.codes.view(torch.uint8).any() and not out.scale_inv.any()

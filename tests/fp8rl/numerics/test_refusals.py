"""What the numerics refuse: a call, and the words of the error, before anything is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import (
    BLOCK,
    FP8_DTYPE,
    ExpertRows,
    Quantized,
    Stacked,
    amax_into,
    dequantize_block,
    dequantize_group,
    fake_quantize_int8_kv,
    fake_quantize_kv,
    place_boundaries,
    quantize_block,
    quantize_blocks,
    quantize_group,
    quantize_grouped,
    quantize_operand,
    quantize_swiglu,
    quantize_swiglu_grad,
    quantize_weight,
    quantize_weights,
)

CPU = torch.device("cpu")
W = torch.ones(130, 130)
CODES, SCALE_INV = quantize_block(W)
TWO = torch.ones(2, 4)
COUNTS = torch.zeros(2, dtype=torch.int64)
OF_KV = "of K and V must be contiguous"
NO_OUTPUT = "need a contiguous float32 output"

SOURCES: list[tuple[object, str]] = [
    (torch.zeros(2, 2, dtype=torch.float64), "float64; convert it to bfloat16"),
    (torch.zeros(2, 2, dtype=torch.int8), "int8; multiply codes by their scales"),
    (torch.zeros(2, 2).to(FP8_DTYPE), "float8_e4m3fn; multiply codes by their scales"),
    (torch.zeros(2, 2).to_sparse(), "sparse tensor; make it dense"),
    (torch.zeros(2, 2).numpy(), "Cannot quantize a ndarray; give a torch.Tensor"),
]
CALLS: list[tuple[Callable[[], object], str]] = [
    *((lambda x=x: quantize_block(x), message) for x, message in SOURCES),
    (lambda: quantize_group(torch.tensor(1.0)), r"shape \(\)"),
    *(
        (lambda quantize=quantize: quantize(TWO[None]), "expected 2 dimension")
        for quantize in (quantize_block, quantize_operand, quantize_weight, quantize_swiglu)
    ),
    (lambda: quantize_operand(TWO.double()), r"torch\.float64"),
    (
        lambda: quantize_group(TWO, scale_format="e8m0"),
        "Unknown scale_format 'e8m0'; use one of fp32, pow2",
    ),
    (lambda: dequantize_block(CODES, SCALE_INV[:1]), r"shape \(2, 2\)"),
    (lambda: dequantize_block(CODES, SCALE_INV.bfloat16()), "bfloat16 of shape"),
    (lambda: dequantize_block(CODES.view(torch.uint8), SCALE_INV), r"dequantize torch\.uint8"),
    (lambda: dequantize_block(CODES[None], SCALE_INV), "expected 2 dimension"),
    (lambda: dequantize_group(CODES, SCALE_INV), r"shape \(130, 2\)"),
    (lambda: quantize_swiglu(torch.zeros(4, 3)), "no halves of equal width"),
    (lambda: quantize_swiglu_grad(torch.zeros(4, 8), torch.zeros(4, 8)), r"must be \(4, 4\)"),
    (lambda: quantize_swiglu_grad(TWO.half(), torch.zeros(2, 8)), "of that dtype, not"),
    *(
        (lambda slots=slots: amax_into(slots, [TWO]), NO_OUTPUT)
        for slots in (torch.zeros(2), torch.zeros(1).double())
    ),
    (lambda: amax_into(torch.zeros(4)[::2], [TWO, TWO]), NO_OUTPUT),
    (
        lambda: fake_quantize_kv(TWO, TWO.double(), torch.ones(2), COUNTS),
        "Cannot quantize a tensor of dtype",
    ),
    (lambda: fake_quantize_int8_kv(TWO, TWO.double()), "Cannot quantize a tensor of dtype"),
    (lambda: fake_quantize_kv(TWO, TWO, torch.ones(1), COUNTS), OF_KV),
    (lambda: fake_quantize_kv(TWO, TWO, torch.ones(2), COUNTS.int()), OF_KV),
    (lambda: quantize_weights([W, W[:5]]), "must have one shape"),
    *(
        (lambda order=order: ExpertRows((3, 4), 1, order), "name each at most once")
        for order in ((0, 0), (2,))
    ),
    *(
        (lambda rows=rows: quantize_grouped(W[:8], rows), "8 rows on cpu do not fit expert_rows")
        for rows in (ExpertRows((3, 4), 1), ExpertRows((4, 4), 128))
    ),
    (
        lambda: ExpertRows((200, 130), 1).table(CPU),
        "aligned to 1; make ExpertRows with an alignment of",
    ),
    (
        lambda: place_boundaries(torch.ones(203, 4), ExpertRows((3, 200), 128)),
        "does not fit 384 rows",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        call()


def empty(*shape: int) -> Quantized:
    codes = torch.zeros(shape, dtype=torch.uint8).view(FP8_DTYPE)
    return Quantized(codes, torch.zeros(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)))


def test_nothing_is_written_where_one_of_many_is_refused() -> None:
    good, bad = empty(4, 4), empty(3, 4)
    with pytest.raises(UnsupportedError):
        quantize_blocks([(torch.ones(4, 4), good), (torch.ones(4, 4), bad)])
    assert not good.codes.view(torch.uint8).any() and not good.scale_inv.any()


@pytest.mark.parametrize(
    ("weights", "at"),
    [
        ([torch.ones(4, 4)] * 2, [0, 2]),
        ([torch.ones(4, 4)] * 2, [0]),
        ([torch.ones(4, 4), torch.ones(4, 3)], [0, 1]),
        ([torch.ones(4, 4), torch.ones(4, 4).to(FP8_DTYPE)], [0, 1]),
    ],
)
def test_a_stack_that_does_not_fit(weights: list[torch.Tensor], at: list[int]) -> None:
    out = empty(2, 4, 4)
    with pytest.raises(UnsupportedError):
        quantize_blocks([], BLOCK, "fp32", [Stacked(weights, out, at)])
    assert not out.codes.view(torch.uint8).any() and not out.scale_inv.any()

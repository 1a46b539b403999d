"""Fused quantization kernels against the separate operations and the codes of the reference."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import GROUP, cdiv, quantize_swiglu, reference
from fp8rl.recipe import ScaleFormat
from support.shapes import HALF_GROUPS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
fused = pytest.importorskip("fp8rl.numerics.triton.activations")
swiglu = pytest.importorskip("fp8rl.numerics.triton.swiglu")

SHAPES = [(1, 128), (7, 384), (1025, 5120), *((33, width) for width in HALF_GROUPS)]
FORMATS = ["fp32", "pow2"]


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", generator=generator)
    x *= torch.logspace(-2, 2, rows, device="cuda")[:, None]
    x[:, : min(GROUP, columns) // 2] = 0  # half a group of zeros, and for one row a whole one
    x[0] = 0
    return x.to(torch.bfloat16)


def narrowed(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """The bytes of the codes of these columns, behind which all must be zeros."""
    made = codes.view(torch.uint8)
    assert made.shape[1] == cdiv(columns, GROUP) * GROUP and not made[:, columns:].any()
    return made[:, :columns]


def near(codes: torch.Tensor, scales: torch.Tensor, y: torch.Tensor, form: ScaleFormat) -> None:
    """Codes and scales of ``y``, but for values that end on the other side of a rounding."""
    expected = reference.quantize_group(y, GROUP, form)
    got = scales.t()[: y.shape[0]]
    if form == "fp32":
        torch.testing.assert_close(got, expected.scale_inv, rtol=2**-7, atol=0)
    same = (got == expected.scale_inv).repeat_interleave(GROUP, 1)[:, : y.shape[1]]
    equal = narrowed(codes, y.shape[1]) == expected.codes.view(torch.uint8)
    assert same.float().mean() > 0.98
    assert equal[same].float().mean() > 0.99


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_bit_for_bit(shape, form):
    x = inputs(*shape)
    codes, scales = fused.quantize_rows(x, form)
    expected = reference.quantize_group(x.cpu(), GROUP, form)
    assert scales.shape == (cdiv(shape[1], GROUP), (shape[0] + 3) // 4 * 4)
    assert torch.equal(scales.t()[: shape[0]].cpu(), expected.scale_inv)
    assert torch.equal(narrowed(codes, shape[1]).cpu(), expected.codes.view(torch.uint8))


def test_rows_of_a_wider_tensor_and_nan():
    wide = inputs(40, 1024)
    wide[3, 300] = torch.nan
    wide[4, 301] = torch.inf
    x = wide[:, 256:512]
    codes, scales = fused.quantize_rows(x, "fp32")
    expected = reference.quantize_group(x.contiguous().cpu(), GROUP, "fp32")
    assert torch.equal(scales.t()[:40].cpu(), expected.scale_inv)
    assert torch.equal(codes.view(torch.uint8).cpu(), expected.codes.view(torch.uint8))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul(shape, form):
    rows, columns = shape
    x = torch.cat([inputs(rows, columns), inputs(rows, columns, 1)], 1)
    codes, scales = fused.quantize_rows(x, form, silu_and_mul=True)
    gate, up = x.double().split(columns, 1)
    near(codes, scales, (torch.nn.functional.silu(gate) * up).bfloat16(), form)
    trainer = quantize_swiglu(x, form, columnwise=False).rowwise
    assert trainer is not None
    assert torch.equal(codes.view(torch.uint8), trainer.codes.view(torch.uint8))
    assert torch.equal(scales.t()[:rows], trainer.scale_inv)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_silu_and_mul_alone_gives_the_same_codes(shape, form):
    """So an engine that is not compiled, where nothing is fused, agrees with one that is."""
    rows, columns = shape
    wide = torch.cat([inputs(rows, columns), inputs(rows, columns, 1), inputs(rows, 128)], 1)
    x = wide[:, : 2 * columns]
    y = swiglu.silu_and_mul(x)
    assert y.shape == (rows, columns) and y.dtype == torch.bfloat16 and y.is_contiguous()
    for got, want in zip(
        fused.quantize_rows(y, form), fused.quantize_rows(x, form, silu_and_mul=True), strict=True
    ):
        assert torch.equal(got[:, :rows].view(torch.uint8), want[:, :rows].view(torch.uint8))
    gate, up = x.float().chunk(2, 1)
    once = (torch.nn.functional.silu(gate) * up).bfloat16()
    assert (y != once).float().mean() < 1e-3  # the last bit of exp
    assert swiglu.silu_and_mul(x[:0]).shape == (0, columns)


def test_no_rows_at_all():
    codes, scales = fused.quantize_rows(torch.empty(0, 256, device="cuda").bfloat16(), "fp32")
    assert codes.shape == (0, 256) and scales.shape == (2, 0)

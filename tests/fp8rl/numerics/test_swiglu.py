"""SwiGLU with quantization in one kernel: the reference against float64, kernels against the two
operations apart on CPU copies.

``exact`` inputs have gates whose sigmoid is 0, 1/2 or 1 whoever computes it, so there every bit
must be right; others differ in the last bits of the exponential.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8rl.numerics import Operand, quantize_operand, reference
from support.devices import DEVICE, HAS_KERNELS, INTERPRETED, Device, assert_same, needs_kernels
from support.shapes import DTYPES, FORMATS

FUSES = HAS_KERNELS and (INTERPRETED or torch.cuda.get_device_capability() >= (9, 0))
needs_hopper = pytest.mark.skipif(INTERPRETED or not FUSES, reason="needs a Hopper GPU")
MODES = [("native", "fp32"), ("native", "pow2"), ("software", "fp32")]
if not (HAS_KERNELS and Device(True).module("quantize").has_native_cast(DEVICE)):
    MODES = [("software", "fp32"), ("software", "pow2")]
SIDES = [(True, True), (True, False), (False, True)]
SHAPES = [(1, 128), (203, 384), (258, 256), (9, 192), (5, 1216)]
"""Rows of any number past a multiple of four; two kernels compute halves that end in a group."""
NAMES = ["quantize_swiglu", "quantize_swiglu_grad"]


def set_cast(cast: str, patch: pytest.MonkeyPatch) -> None:
    dual = Device(True).module("dual")
    patch.setattr(dual, "has_native_cast", lambda device: cast == "native")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """``grad`` and ``h`` with every kind of value; gates up to 4096 or zero."""
    g = generator(rows + cols)
    gates = torch.tensor([0.0, 0.0, 32.0, 200.0, -200.0, 4096.0])
    gate = gates[torch.randint(0, len(gates), (rows, cols), generator=g)]
    gate *= 1 + torch.rand(rows, cols, generator=g)
    up, grad = torch.randn(2, rows, cols, generator=g) * 2.0 ** torch.randint(
        -9, 4, (2, rows, cols), generator=g
    )
    gate[:, 40], up[:, 41], grad[:, 42] = torch.inf, torch.nan, -torch.inf
    gate[0, 100], up[rows // 2, 3], grad[-1, cols - 1] = torch.nan, torch.inf, torch.nan
    gate[rows // 3, 64:70], up[:, 90], grad[:, 91] = -torch.inf, 0.0, 0.0
    return [grad.to(dtype), torch.cat((gate, up), 1).to(dtype)]


def arguments(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return tensors[-1:] if name == "quantize_swiglu" else tensors


def run(name: str, tensors: list[torch.Tensor], *options: Any) -> Operand:
    """By the kernel of that name, on the device."""
    moved = [x.to(DEVICE) for x in arguments(name, tensors)]
    return getattr(Device(True).module("swiglu"), name)(*moved, *options)


@needs_kernels
@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bit_for_bit(name, shape, sides, mode, monkeypatch):
    cast, scale_format = mode
    tensors = exact(*shape)
    expected = getattr(reference, name)(*arguments(name, tensors), scale_format, *sides)
    assert any(side is not None and side.codes.isnan().any() for side in expected)
    plain = reference.swiglu(tensors[1]) if name == "quantize_swiglu" else tensors[1]
    set_cast(cast, monkeypatch)
    if FUSES or shape[1] % 128:
        for apart in ("swiglu", "swiglu_grad"):  # the activation is not computed apart
            monkeypatch.delattr(reference, apart)
    if sides == (True, False):  # rows of a wider tensor
        h = torch.nn.functional.pad(tensors[1], (4, 40), value=torch.nan)
        tensors[1] = h.to(DEVICE)[:, 4 : 4 + tensors[1].shape[1]]
    actual = run(name, tensors, scale_format, *sides)
    for got, want in zip(actual, expected, strict=True):
        assert_same(got, want)
        # Whole groups, and scales where products take them without a copy.
        assert got is None or got.codes.shape[1] % 128 == 0
    operand = Device(True).module("dual").quantize_operand(plain.to(DEVICE), scale_format, *sides)
    for got, want in zip(actual, operand, strict=True):
        assert got is None or got.scale_inv.stride() == want.scale_inv.stride()


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [200, 384])
def test_quantized_as_if_it_had_been_stored(device, dtype, scale_format, width):
    g = generator(width)
    h = (torch.randn(130, 2 * width, generator=g) * 3).to(dtype).requires_grad_()
    grad = (torch.randn(130, width, generator=g) * 1e-3).to(dtype)
    wide = h.double()
    y = torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]
    (of_h,) = torch.autograd.grad(y, wide, grad.double())
    swiglu = device.module("swiglu")
    there, grad_there = h.detach().to(device.at), grad.to(device.at)
    for got, exact in (
        (swiglu.quantize_swiglu(there, scale_format, True, True), y.detach()),
        (swiglu.quantize_swiglu_grad(grad_there, there, scale_format, True, True), of_h),
    ):
        expected = quantize_operand(exact.to(dtype), scale_format)
        for side, wanted in zip(got, expected, strict=True):
            assert side is not None and wanted is not None
            codes = side.codes.view(torch.uint8)[:, : wanted.codes.shape[1]].cpu().int()
            # Float32 and float64 round to different values of the dtype once in a while.
            apart = (codes - wanted.codes.contiguous().view(torch.uint8).int()).abs()
            assert (apart > 0).float().mean() < 1e-3
            near = torch.isclose(side.scale_inv.cpu(), wanted.scale_inv, rtol=2**-7, atol=0)
            assert near.float().mean() >= (1 if scale_format == "fp32" else 0.99)


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_what_the_kernel_does_not_read_is_computed_apart(name):
    grad, h = exact(130, 128)
    for tensors in (
        [grad.t().contiguous().t(), h.t().contiguous().t()],
        [grad, torch.nn.functional.pad(h, (1, 3))[:, 1:257]],  # not aligned
        [grad[:0], h[:0]],
    ):
        expected = getattr(reference, name)(*arguments(name, tensors), "fp32", True, True)
        for got, want in zip(run(name, tensors, "fp32", True, True), expected, strict=True):
            assert_same(got, want)


@needs_hopper
def test_more_than_two_to_the_31_elements():
    free, _ = torch.cuda.mem_get_info()
    rows, cols = (2**31 >> 12) + 200, 2048
    if free < rows * cols * 2 * 5:
        pytest.skip("needs 10 GiB of free GPU memory")
    h = torch.full((rows, 2 * cols), 32.0, dtype=torch.bfloat16, device=DEVICE)
    h[-1, 0] = 64.0
    _, columnwise = Device(True).module("swiglu").quantize_swiglu(h, "fp32", False, True)
    codes = columnwise.codes.view(torch.uint8)
    assert codes[0, rows - 1] == 0x7E and codes[0, rows - 2] == 0x76  # half of the largest
    assert (codes[1:, :rows] == 0x7E).all() and not codes[:, rows:].any()

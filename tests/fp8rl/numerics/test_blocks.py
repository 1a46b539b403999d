"""Many weights quantized in one launch, into live storage, against `quantize_block` of each."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import BLOCK, FP8_DTYPE, Quantized, Stacked, quantize_blocks, reference
from support.devices import Device, assert_same
from support.shapes import FORMATS


def sources() -> list[torch.Tensor]:
    """Shapes that repeat and that do not, every dtype, strided and unaligned views."""
    torch.manual_seed(0)
    base = torch.randn(300, 520)
    return [
        torch.randn(200, 300).bfloat16(),
        torch.randn(200, 300).bfloat16(),
        torch.randn(200, 300).half(),
        torch.randn(130, 128).half(),
        torch.randn(64, 128),
        torch.randn(5, 7),
        base.bfloat16()[3:131, 5:200],
        base.bfloat16().t(),
        base[::2, ::3].half(),
        base.bfloat16().view(-1)[1 : 1 + 150 * 256].view(150, 256),
        torch.zeros(0, 5).bfloat16(),
        torch.full((128, 128), torch.nan),
    ]


def filled(device: Device, *shape: int) -> Quantized:
    """Outputs of other bytes, so that an element no program writes shows."""
    codes = torch.full(shape, 0x55, dtype=torch.uint8, device=device.at).view(FP8_DTYPE)
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    return Quantized(codes, torch.full(blocks, 7.0, device=device.at))


def quantize(device: Device, *arguments: object) -> None:
    """By the public function, which calls the kernels on a GPU alone."""
    many = device.module("multi_tensor") if device.triton else None
    (many.quantize_blocks if many else quantize_blocks)(*arguments)


@pytest.mark.parametrize("scale_format", FORMATS)
def test_each_weight_has_the_codes_it_would_have_alone(device, scale_format):
    jobs = [(device.moved(x), filled(device, *x.shape)) for x in sources()]
    quantize(device, jobs, BLOCK, scale_format)
    for x, (_, out) in zip(sources(), jobs, strict=True):
        assert_same(out, reference.quantize_block(x, BLOCK, scale_format))


@pytest.mark.parametrize("scale_format", FORMATS)
@pytest.mark.parametrize("first", [0, 256])
def test_a_stack_takes_the_codes_of_each_weight(device, scale_format, first):
    """Rows of a larger stack, as gate and up lie in vLLM's; bytes beside them stay."""
    torch.manual_seed(3)
    weights = [
        torch.randn(200, 384).bfloat16(),
        torch.randn(200, 384).bfloat16(),
        torch.randn(200, 384),
        torch.randn(384, 200).bfloat16().t(),
        torch.randn(200, 400).bfloat16()[:, 3:387],
    ]
    at = [4, 0, 6, 1, 3]
    whole = filled(device, 7, 512, 384)
    block = first // 128
    out = Quantized(whole.codes[:, first : first + 200], whole.scale_inv[:, block : block + 2])
    moved = [device.moved(w) for w in weights]
    job = (moved[0], filled(device, *weights[0].shape))
    quantize(device, [job], BLOCK, scale_format, [Stacked(moved, out, at)])
    for w, number in zip(weights, at, strict=True):
        want = reference.quantize_block(w, BLOCK, scale_format)
        assert_same(Quantized(out.codes[number], out.scale_inv[number]), want)
    assert_same(job[1], reference.quantize_block(weights[0], BLOCK, scale_format))
    codes, scales = whole.codes.view(torch.uint8).cpu(), whole.scale_inv.cpu()
    codes[at, first : first + 200], scales[at, block : block + 2] = 0x55, 7.0
    assert (codes == 0x55).all() and (scales == 7.0).all()

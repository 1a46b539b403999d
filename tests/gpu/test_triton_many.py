"""Kernels that take many tensors in one launch, against the torch reference on CPU copies.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from fp8rl.numerics import FP8_DTYPE, Quantized, Stacked, all_finite, reference
from support.triton_device import DEVICE, INTERPRETED

many = importlib.import_module("fp8rl.numerics.triton.multi_tensor")


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
        base.bfloat16()[3:131, 5:200],
        base.bfloat16().t(),
        base[::2, ::3].half(),
        base.bfloat16().view(-1)[1 : 1 + 150 * 256].view(150, 256),
        torch.zeros(0, 5).bfloat16(),
        torch.full((128, 128), torch.nan),
    ]


def filled(shape: torch.Size) -> Quantized:
    """Outputs of other bytes, so that an element no program writes shows."""
    codes = torch.full(tuple(shape), 0x55, dtype=torch.uint8, device=DEVICE).view(FP8_DTYPE)
    return Quantized(codes, torch.full((-(-shape[0] // 128), -(-shape[1] // 128)), 7.0).to(DEVICE))


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_quantize_equals_the_reference_one_by_one(scale_format):
    wanted = [reference.quantize_block(x, (128, 128), scale_format) for x in sources()]
    moved = []
    for x in sources():  # a move to the GPU alone would make views contiguous
        storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
        storage.copy_(torch.tensor([], dtype=x.dtype).set_(x.untyped_storage()))
        view = storage.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())
        assert torch.equal(view.cpu().nan_to_num(), x.nan_to_num())
        moved.append(view)
    jobs = [(x, filled(x.shape)) for x in moved]
    many.quantize_blocks(jobs, (128, 128), scale_format)
    for (x, out), want in zip(jobs, wanted, strict=True):
        assert torch.equal(out.codes.view(torch.uint8).cpu(), want.codes.view(torch.uint8)), x.shape
        assert torch.equal(out.scale_inv.cpu(), want.scale_inv), x.shape


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("first", [0, 256])
def test_a_stack_takes_the_codes_of_each_weight(scale_format, first):
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
    codes = torch.full((7, 512, 384), 0x55, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((7, 4, 3), 7.0, device=DEVICE)
    live = codes[:, first : first + 200].view(FP8_DTYPE)
    out = Quantized(live, scales[:, first // 128 : first // 128 + 2])
    moved = [w.to(DEVICE) for w in weights]
    job = (moved[0], filled(moved[0].shape))
    many.quantize_blocks([job], (128, 128), scale_format, [Stacked(moved, out, at)])
    for w, number in zip(weights, at, strict=True):
        want = reference.quantize_block(w, (128, 128), scale_format)
        found = out.codes[number].view(torch.uint8).cpu()
        assert torch.equal(found, want.codes.view(torch.uint8)), number
        assert torch.equal(out.scale_inv[number].cpu(), want.scale_inv), number
    assert torch.equal(job[1].codes.view(torch.uint8), live[4].view(torch.uint8))
    beside = codes.cpu()
    beside[at, first : first + 200] = 0x55
    assert (beside == 0x55).all()


def clean() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(400_000).bfloat16(),
        torch.full((3,), torch.finfo(torch.float32).max),
        torch.randn(2 * many._CHUNK + 5).half(),
        torch.arange(256, dtype=torch.uint8)[:127].repeat(2, 1).view(FP8_DTYPE),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.randn(50, 40)[:, 3:7],  # strided: read in parts
    ]


@pytest.mark.parametrize(
    ("number", "place", "value"),
    [
        (0, -1, torch.nan),
        (0, 1 << 17, torch.inf),
        (1, 2, -torch.inf),
        (2, 1 << 18, torch.nan),
        (3, 7, torch.nan),
        (5, 0, torch.nan),
        (6, 11, torch.inf),
    ],
)
def test_one_bad_element_is_found_in_its_tensor(number, place, value):
    def answers(tensors: list[torch.Tensor]) -> list[bool]:
        if INTERPRETED:
            return many.start_finite_check([t.contiguous() for t in tensors])()
        return all_finite([t.to(DEVICE) for t in tensors])

    tensors = clean()
    assert answers(tensors) == [True] * len(tensors)
    flat = tensors[number].flatten()
    flat[place] = value
    tensors[number] = flat
    assert answers(tensors) == [i != number for i in range(len(tensors))]


@pytest.mark.parametrize("limit", [65504.0, 3.2e38])
def test_what_is_beyond_a_limit_is_found(limit):
    tensors, wanted = [], []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, FP8_DTYPE):
        for value in (448.0, 65504.0, 65536.0, -3.1e38, 3.3e38):
            if dtype in (torch.float16, FP8_DTYPE) and abs(value) > torch.finfo(dtype).max:
                continue
            tensors.append(torch.full((many._CHUNK + 3,), value).to(dtype).to(DEVICE))
            wanted.append(bool(tensors[-1][0].double().abs() <= limit))
    assert many.start_finite_check(tensors, limit)() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shards_go_straight_into_live_storage(dtype):
    """Narrowed along either dimension, at any offset; rows beside them keep their bytes."""
    torch.manual_seed(2)
    full = torch.randn(700, 390).to(dtype)
    shards = [
        (slice(0, 256), slice(0, 200)),
        (slice(131, 387), slice(190, 390)),  # row-parallel: neither aligned nor contiguous
        (slice(387, 700), slice(3, 203)),  # ragged at the end
    ]
    codes = torch.full((1024, 200), 0x55, dtype=torch.uint8, device=DEVICE)
    scales = torch.full((8, 2), 7.0, device=DEVICE)
    moved, jobs, first = full.to(DEVICE), [], 128
    for rows, columns in shards:
        part = moved[rows, columns]
        last = first + len(part)
        live = codes[first:last].view(FP8_DTYPE)
        jobs.append((part, Quantized(live, scales[first // 128 : -(-last // 128)])))
        first = -(-last // 128) * 128
    many.quantize_blocks(jobs, (128, 128), "fp32")
    untouched, unscaled = torch.ones(1024, dtype=torch.bool), torch.ones(8, dtype=torch.bool)
    first = 128
    for rows, columns in shards:
        want = reference.quantize_block(full[rows, columns], (128, 128), "fp32")
        last = first + want.codes.shape[0]
        assert torch.equal(codes[first:last].cpu(), want.codes.view(torch.uint8))
        assert torch.equal(scales[first // 128 : -(-last // 128)].cpu(), want.scale_inv)
        untouched[first:last] = False
        unscaled[first // 128 : -(-last // 128)] = False
        first = -(-last // 128) * 128
    assert bool((codes.cpu()[untouched] == 0x55).all() and untouched.sum() > 150)
    assert bool((scales.cpu()[unscaled] == 7.0).all() and unscaled.any())

"""`all_finite`: many tensors looked at in one launch."""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import FP8_DTYPE, all_finite
from fp8rl.numerics.finite import largest_bits
from support.devices import INTERPRETED
from support.shapes import DTYPES


@pytest.mark.parametrize("limit", [1.0, 65504.0, 3.2e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beyond_a_limit_passes_for_infinite(device, dtype, limit):
    """Numbers of 16 bits, and in float32 those beside the limit, against a comparison."""
    if dtype == torch.float32:
        at = torch.tensor(limit)
        numbers = torch.stack([at.nextafter(torch.tensor(to)) for to in (0.0, limit, torch.inf)])
    else:
        numbers = torch.arange(1 << 16).short().view(dtype)
    wanted = torch.isfinite(numbers) & (numbers.double().abs() <= limit)
    some = slice(None, None, 1 if dtype == torch.float32 else 4099 if device.triton else 257)
    given = [x.clone() for x in numbers[some].to(device.at)]
    if device.triton:
        found = device.module("multi_tensor").start_finite_check(given, limit)()
    else:
        found = all_finite(given, limit)
    assert found == wanted[some].tolist()
    magnitudes = numbers.abs().view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert torch.equal(magnitudes <= largest_bits(dtype, limit), wanted)


@pytest.mark.parametrize(
    ("number", "place", "value"),
    [
        (0, 1 << 17, torch.inf),
        (1, 2, -torch.inf),
        (2, (1 << 19) + 3, torch.nan),
        (3, 7, torch.nan),
        (5, 0, torch.nan),
        (6, 11, torch.inf),
    ],
)
def test_one_bad_element_is_found_in_its_tensor(device, number, place, value):
    torch.manual_seed(1)
    tensors = [
        torch.randn(400_000).bfloat16(),
        torch.full((3,), torch.finfo(torch.float32).max),
        torch.randn((1 << 19) + 5).half(),  # several parts, for the kernel and without it
        torch.arange(256, dtype=torch.uint8)[:127].repeat(2, 1).view(FP8_DTYPE),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.randn(50, 40)[:, 3:7],  # strided: read in parts
    ]

    def answers() -> list[bool]:
        if device.triton and INTERPRETED:
            many = device.module("multi_tensor")
            return many.start_finite_check([t.contiguous() for t in tensors])()
        return all_finite([t.to(device.at) for t in tensors])

    assert answers() == [True] * len(tensors)
    shape, flat = tensors[number].shape, tensors[number].flatten()
    flat[place] = value
    tensors[number] = flat.view(shape)
    assert answers() == [i != number for i in range(len(tensors))]

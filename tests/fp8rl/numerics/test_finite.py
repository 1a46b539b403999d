"""`all_finite`: many tensors looked at in one launch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.numerics import FP8_DTYPE, all_finite
from fp8rl.numerics.finite import largest_bits
from support.devices import DEVICE, INTERPRETED, Device, needs_kernels
from support.shapes import DTYPES as FLOATS

DTYPES = [*FLOATS, FP8_DTYPE]


@settings(max_examples=60)
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


@pytest.mark.parametrize("limit", [1.0, 65504.0, 3.2e38])
@pytest.mark.parametrize("dtype", FLOATS)
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


def clean(chunk: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(400_000).bfloat16(),
        torch.full((3,), torch.finfo(torch.float32).max),
        torch.randn(2 * chunk + 5).half(),
        torch.arange(256, dtype=torch.uint8)[:127].repeat(2, 1).view(FP8_DTYPE),
        torch.zeros(0),
        torch.tensor(1.0),
        torch.randn(50, 40)[:, 3:7],  # strided: read in parts
    ]


@needs_kernels
@pytest.mark.parametrize(
    ("number", "place", "value"),
    [
        (0, 1 << 17, torch.inf),
        (1, 2, -torch.inf),
        (2, 1 << 18, torch.nan),
        (3, 7, torch.nan),
        (6, 11, torch.inf),
    ],
)
def test_the_kernel_finds_one_bad_element_in_its_tensor(number, place, value):
    many = Device(True).module("multi_tensor")

    def answers(tensors: list[torch.Tensor]) -> list[bool]:
        if INTERPRETED:
            return many.start_finite_check([t.contiguous() for t in tensors])()
        return all_finite([t.to(DEVICE) for t in tensors])

    tensors = clean(many._CHUNK)
    assert answers(tensors) == [True] * len(tensors)
    flat = tensors[number].flatten()
    flat[place] = value
    tensors[number] = flat
    assert answers(tensors) == [i != number for i in range(len(tensors))]

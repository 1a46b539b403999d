"""Magnitudes gathered over calls, by the reference and by the kernel, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.devices import Device
from support.shapes import DTYPES, PACKED, packed


def check(device: Device, tensors: list[torch.Tensor], *, in_place: bool = True) -> None:
    """The maxima of two calls; whether the kernel reads all or none of the tensors in place."""
    amax = device.module("amax")
    got, expected = torch.zeros(len(tensors), device=device.at), np.zeros(len(tensors))
    for part in (tensors, [x[: len(x) // 2] * 2 for x in tensors]):
        amax.amax_into(got, [device.moved(x) for x in part])
        found = [np.abs(x.double().numpy()).max(initial=0) for x in part]
        expected = np.maximum(expected, found)
    np.testing.assert_array_equal(got.cpu().double().numpy(), expected.astype(np.float32))
    if device.triton:
        for x in tensors:
            assert (amax._rows(x.shape, x.stride(), x.dtype) is not None) == in_place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PACKED)
def test_slices_of_a_fused_projection(device, shape, dtype):
    q, k, v = packed(*shape, dtype)
    check(device, [q.flatten(3), k, v])
    # After norm and rotary embedding q and k are tensors of their own.
    heads = (*q.shape[:2], shape[2] * shape[3], shape[4])
    check(device, [q.reshape(heads).contiguous(), k.contiguous(), v])


def test_orders_of_dimensions_and_odd_sizes(device):
    x = torch.randn(5, 6, 7, 9, generator=torch.Generator().manual_seed(0))
    check(device, [x, x.transpose(0, 2), x[0, 0, 0]])
    check(device, [x[..., :3], x[:, :, 2:5].contiguous(), x[:, 0, 0]])
    check(device, [x[:, 0], x[:, 1:3], x.transpose(2, 3)[:, :3]])
    odd = [x[..., ::2], x[:, :3, 1:3], x.double(), x[:1].expand(4, 6, 7, 9)]
    check(device, odd, in_place=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_what_is_not_finite_stays_in_its_slot(device, bad, dtype):
    into = device.module("amax").amax_into
    x = torch.randn(200, 2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[150, 1, 77] = bad
    slots = torch.zeros(3, device=device.at)
    for _ in range(2):
        into(slots, [device.moved(part) for part in (x, x[:100], x[:, 1])])
        into(slots, [torch.ones(4, 4, device=device.at)] * 3)
    assert slots.isfinite().tolist() == [False, True, False]
    assert slots.isnan().tolist() == [bad != bad, False, bad != bad]
    assert not slots.signbit().any()

"""The kernel of K and V as a cache of 8 bits holds them, against the torch reference, bit for bit.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fp8rl.numerics import fake_quantize_kv, reference
from support.triton_device import DEVICE, INTERPRETED

triton_kv = importlib.import_module("fp8rl.numerics.triton.kv_cache")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SHAPES = [(65, 1, 2, 4, 128), (7, 3, 1, 2, 64), (1, 1, 1, 1, 80), (130, 2, 2, 1, 256)]
"""Tokens, batch, groups, query heads a group, head size."""


def packed(tokens: int, batch: int, groups: int, ratio: int, head: int, dtype: torch.dtype):
    """k and v as megatron splits them from one tensor, ``[s, b, groups, head]``."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, batch, groups, (ratio + 2) * head, generator=g)
    x *= torch.randn(tokens, batch, groups, 1, generator=g).mul(3).exp2()
    return x.to(dtype).to(DEVICE).split([ratio * head, head, head], dim=3)[1:]


def expected_of(k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, clipped: torch.Tensor):
    """What the reference gives."""
    found = reference.fake_quantize_kv(k, v, scales, clipped)
    idle = torch.zeros_like(clipped)
    return as_stored(found, reference.fake_quantize_kv(k.float(), v.float(), scales, idle))


def as_stored(found: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``found``, where the interpreter, which truncates float32 to bfloat16, stores ``wide``."""
    if not INTERPRETED:
        return list(found)
    cut = [x.view(torch.int32).bitwise_and(-0x10000).view(torch.float32).bfloat16() for x in wide]
    return [y if x.dtype == torch.bfloat16 else x for x, y in zip(found, cut, strict=True)]


def check(k: torch.Tensor, v: torch.Tensor, scales=(0.0131, 0.0217), in_place=(True, True)) -> None:
    """The kernel equals the reference, twice over the same counts; these of them read in place."""
    table = torch.tensor(scales, device=DEVICE)
    expected, got = (torch.zeros(2, dtype=torch.int64, device=d) for d in ("cpu", DEVICE))
    for _ in range(2):
        wanted = expected_of(k.cpu(), v.cpu(), table.cpu(), expected)
        found = triton_kv.fake_quantize_kv(k, v, table, got)
        check_equal(found, wanted, k, v)
    assert got.tolist() == expected.tolist()
    for x, inside in zip((k, v), in_place, strict=True):
        assert (triton_kv._rows(x).x.data_ptr() == x.data_ptr()) is inside


def check_equal(found: Any, wanted: Any, *sources: torch.Tensor) -> None:
    """The bits are equal, up to those of NaN."""
    for x, y, source in zip(found, wanted, sources, strict=True):
        assert x.is_contiguous() and x.shape == source.shape and x.dtype == source.dtype
        x = x.cpu()
        assert torch.equal(x.isnan(), y.isnan())
        kept = ~y.isnan()
        width = torch.int16 if x.element_size() == 2 else torch.int32
        assert torch.equal(x.view(width)[kept], y.view(width)[kept])


def check_int8(k: torch.Tensor, v: torch.Tensor) -> None:
    pair = k.cpu(), v.cpu()
    wide = reference.fake_quantize_int8_kv(*(x.float() for x in pair))
    wanted = as_stored(reference.fake_quantize_int8_kv(*pair), wide)
    check_equal(triton_kv.fake_quantize_int8_kv(k, v), wanted, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_equals_the_reference(shape, dtype):
    k, v = packed(*shape, dtype)
    check_int8(k, v)
    check_int8(k.contiguous(), v[:0])
    check_int8(v.transpose(0, 2), k[0, 0, 0])  # copied first
    k = k.clone()
    k[0, 0, 0, 5] = torch.nan
    check_int8(k, v)


def test_ties_of_int8():
    """Every half of every step of a few scales."""
    x = torch.arange(-254, 255) / 2
    rows = torch.cat((x, torch.zeros(3)))[None] * torch.tensor([[1.0], [2.0**-9], [0.37], [2e4]])
    for dtype in DTYPES:
        check_int8(rows.to(dtype).to(DEVICE), rows[:2].to(dtype).to(DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_slices_of_a_packed_projection(shape, dtype):
    k, v = packed(*shape, dtype)
    check(k, v)
    check(k.contiguous(), v)  # after norm and rotary embedding k is a tensor of its own
    if shape[1] == 1:
        check(k[:, 0], v[:, 0])  # packed sequences: [tokens, groups, head]


def test_orders_of_dimensions_and_odd_sizes():
    x = torch.randn(5, 6, 7, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    check(x, x[0, 0, 0])
    check(x[..., :3], x.transpose(0, 2), in_place=(True, False))
    check(x[:, :3, 1:3], x[..., ::2], in_place=(False, False))
    check(x[:0], x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_every_tie_and_what_saturates(dtype):
    """All values between two codes that the dtype has, up to beyond the largest one."""
    if dtype == torch.float32:
        bits = torch.arange(0x3A000000, 0x44200000, 0x8001, dtype=torch.int32)
        x = torch.cat((bits, bits & -0x10000, (bits & -0x10000) + 1)).view(dtype)
    else:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = torch.cat((x, -x))
    for scale in (1.0, 2.0**-7, 0.0131, 3.7, 256.0):
        check(x.to(DEVICE), (x * scale).to(DEVICE), (scale, scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite(dtype):
    x = torch.randn(200, 2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[150, 1, 77], x[151, 0, 3], x[3, 1, 5] = torch.nan, torch.inf, -torch.inf
    check(x.to(DEVICE), x[:100].to(DEVICE), (0.25, 2.0**-50))


def test_the_public_function_takes_this_kernel():
    k, v = packed(33, 1, 2, 2, 64, torch.bfloat16)
    clipped = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = fake_quantize_kv(k, v, torch.ones(2, device=DEVICE), clipped)
    assert all(not x.requires_grad and x.is_contiguous() for x in found)


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_a_graph_replays_it_with_new_scales():
    k, v = packed(300, 1, 2, 2, 128, torch.bfloat16)
    scales = torch.tensor([0.02, 0.03], device=DEVICE)
    clipped = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    triton_kv.fake_quantize_kv(k, v, scales, clipped)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = triton_kv.fake_quantize_kv(k, v, scales, clipped)
    scales.mul_(0.1)
    clipped.zero_()
    graph.replay()
    expected = torch.zeros(2, dtype=torch.int64)
    wanted = reference.fake_quantize_kv(k.cpu(), v.cpu(), scales.cpu(), expected)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, wanted, strict=True))
    assert torch.equal(clipped.cpu(), expected) and expected.all()

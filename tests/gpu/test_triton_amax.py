"""The kernel of magnitudes against the torch reference on the CPU, bit for bit.

Needs a CUDA GPU; with ``TRITON_INTERPRET=1`` and triton installed it runs on the CPU instead.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from fp8rl.numerics import reference
from support.triton_device import DEVICE, INTERPRETED

triton_amax = importlib.import_module("fp8rl.numerics.triton.amax")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def fused_qkv(tokens: int, batch: int, groups: int, ratio: int, head: int, dtype: torch.dtype):
    """q, k and v as megatron splits them from one tensor, ``[s, b, heads, head]``."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, batch, groups, (ratio + 2) * head, generator=g)
    x *= torch.randn(tokens, batch, groups, 1, generator=g).mul(3).exp2()
    return x.to(dtype).to(DEVICE).split([ratio * head, head, head], dim=3)


def check(tensors: list[torch.Tensor], in_place: bool = True) -> None:
    """The maximum equals the reference's over two calls; whether all or none are read in place."""
    expected = torch.zeros(len(tensors))
    got = expected.to(DEVICE)
    for part in (tensors, [x[: len(x) // 2] * 2 for x in tensors]):
        reference.amax_into(expected, [x.cpu() for x in part])
        triton_amax.amax_into(got, part)
    assert torch.equal(got.cpu(), expected)
    for x in tensors:
        assert (triton_amax._rows(x.shape, x.stride(), x.dtype) is not None) == in_place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(65, 1, 2, 4, 128), (7, 3, 1, 2, 64), (1, 1, 1, 1, 80), (130, 2, 2, 1, 256)]
)
def test_slices_of_a_fused_projection(shape, dtype):
    q, k, v = fused_qkv(*shape, dtype)
    check([q.flatten(3), k, v])
    # After norm and rotary embedding q and k are tensors of their own.
    heads = (*q.shape[:2], shape[2] * shape[3], shape[4])
    check([q.reshape(heads).contiguous(), k.contiguous(), v])


def test_packed_sequences_and_other_numbers_of_tensors():
    q, k, v = fused_qkv(33, 1, 2, 2, 64, torch.bfloat16)
    check([x[:, 0] for x in (k, v)])
    check([v])
    check([q, k, v, k, v])
    check([q[:0], k, v])


def test_orders_of_dimensions_and_odd_sizes():
    x = torch.randn(5, 6, 7, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    check([x, x.transpose(0, 2), x[0, 0, 0]])
    check([x[..., :3], x[:, :, 2:5].contiguous(), x[:, 0, 0]])
    check([x[:, 0], x[:, 1:3], x.transpose(2, 3)[:, :3]])
    check([x[..., ::2], x[:, :3, 1:3], x.double(), x[:1].expand(4, 6, 7, 9)], in_place=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_what_is_not_finite_is_kept(bad, dtype):
    x = torch.randn(200, 2, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[150, 1, 77] = bad
    tensors = [x.to(DEVICE), x[:100].to(DEVICE), x[:, 1].to(DEVICE)]
    slots = torch.zeros(3, device=DEVICE)
    for _ in range(2):
        triton_amax.amax_into(slots, tensors)
        triton_amax.amax_into(slots, [torch.ones(4, 4, device=DEVICE)] * 3)
    assert slots.isfinite().tolist() == [False, True, False]
    assert slots.isnan().tolist() == [bad != bad, False, bad != bad]
    assert not slots.signbit().any()


def test_subnormals_and_zeros():
    x = torch.tensor([[0.0, -0.0], [1e-40, -2e-40], [2.0**-33, 0.0]], device=DEVICE)
    for row in range(3):
        check([x[row:], x[: row + 1], x.bfloat16()])


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_a_graph_replays_it_without_memory_of_its_own():
    tensors = [x.contiguous() for x in fused_qkv(300, 1, 2, 2, 128, torch.bfloat16)]
    slots = torch.zeros(3, device=DEVICE)
    triton_amax.amax_into(slots, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        triton_amax.amax_into(slots, tensors)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    tensors[1].mul_(4.0)
    graph.replay()
    expected = torch.zeros(3)
    reference.amax_into(expected, [x.cpu() for x in tensors])
    assert torch.equal(slots.cpu(), expected)

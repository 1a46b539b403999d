"""Decode attention over a paged E4M3 cache against float64 on the decoded cache.

With ``TRITON_INTERPRET=1`` and triton installed the kernels run on a CPU. Exact bits are in
``test_exact.py``.
"""

from __future__ import annotations

import pytest
import torch

from fp8rl.numerics import FP8_DTYPE
from support.triton_device import DEVICE, INTERPRETED

paged = pytest.importorskip("fp8rl.kernels.paged")

LENGTHS = [70, 0, 1, 32, 33, 500]
K_SCALE, V_SCALE = 0.02, 0.03


class Case:
    """Random queries and cache; pages in random order, unused slots full of NaN."""

    def __init__(self, heads: int, kv_heads: int, size: int, page: int, *, by_head: bool = False):
        generator = torch.Generator().manual_seed(heads * size + page)
        most = -(-max(LENGTHS) // page)
        pages = len(LENGTHS) * most
        order = torch.randperm(pages, generator=generator).view(len(LENGTHS), most)
        values = torch.randn(pages, 2, page, kv_heads, size, generator=generator) * 40
        cache = values.clamp(-448, 448).to(FP8_DTYPE)
        for row, length in enumerate(LENGTHS):
            for slot in range(length, most * page):
                cache.view(torch.uint8)[order[row, slot // page], :, slot % page] = 0x7F
        if by_head:  # vLLM's HND layout: the same shape, other strides
            bits = cache.view(torch.uint8).transpose(2, 3).contiguous().transpose(2, 3)
            cache = bits.view(FP8_DTYPE)
        self.cache = cache.to(DEVICE)
        self.table = order.int().to(DEVICE)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
        shape = (len(LENGTHS), heads, size)
        self.query = (torch.randn(shape, generator=generator) * 3).bfloat16().to(DEVICE)
        self.out = torch.full_like(self.query, 7.0)
        self.k_scale = torch.tensor(K_SCALE, device=DEVICE)
        self.v_scale = torch.tensor(V_SCALE, device=DEVICE)

    def run(self, splits: int, *, exact: bool = False) -> torch.Tensor:
        keys, values = self.cache.unbind(1)
        return paged.decode(
            self.query,
            keys,
            values,
            self.table,
            self.lengths,
            softmax_scale=self.query.shape[-1] ** -0.5,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            out=self.out,
            splits=splits,
            ones=paged.ones_like_codes(keys) if exact else None,
        )

    def expected(self) -> torch.Tensor:
        heads, size = self.query.shape[1:]
        result = torch.zeros(self.query.shape, dtype=torch.float64)
        for row, length in enumerate(LENGTHS):
            if not length:
                continue
            slots = self.cache.cpu()[self.table[row].cpu().long()]  # [pages, 2, page, kv, size]
            both = slots.float().transpose(0, 1).flatten(1, 2)[:, :length].double()
            both = both.repeat_interleave(heads // both.shape[2], 2)
            keys, values = both[0] * self.k_scale.item(), both[1] * self.v_scale.item()
            scores = torch.einsum("hd,nhd->hn", self.query[row].cpu().double(), keys)
            weights = (scores * size**-0.5).softmax(-1)
            result[row] = torch.einsum("hn,nhd->hd", weights, values)
        return result


def check(got: torch.Tensor, expected: torch.Tensor) -> None:
    # bfloat16 output (2**-8), probabilities and queries in float16 (2**-11).
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2**-7, atol=2**-8)
    assert (got[LENGTHS.index(0)] == 0).all()


@pytest.mark.parametrize("page", [16, 48, 128])
def test_pages_of_any_size(page):
    case = Case(8, 2, 128, page)
    expected = case.expected()
    for splits in (1, 2, 8):
        check(case.run(splits), expected)
    check(case.run(2, exact=True), expected)


@pytest.mark.parametrize(
    ("heads", "size"), [((4, 4), 64), ((8, 1), 128), ((32, 2), 256), ((6, 2), 128)]
)
def test_heads_and_their_sizes(heads, size):
    case = Case(*heads, size, 16)
    check(case.run(1), case.expected())
    check(case.run(4), case.expected())


def test_cache_ordered_by_head():
    case = Case(8, 2, 128, 16, by_head=True)
    check(case.run(1), case.expected())


def test_large_queries_do_not_overflow():
    case = Case(8, 2, 128, 16)
    case.query *= 1e6  # far outside float16
    check(case.run(1), case.expected())


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA GPU")
def test_a_captured_graph_reads_new_scales_and_lengths():
    case = Case(8, 2, 128, 16)
    case.run(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(4)
    before = case.expected()
    case.k_scale.fill_(K_SCALE / 3)
    case.v_scale.fill_(V_SCALE * 2)
    graph.replay()
    after = case.expected()
    assert (after - before).abs().max() > 0.1
    check(case.out, after)


def test_splits_fill_the_gpu_and_stay_in_range():
    for exact in (False, True):
        counts = [paged.splits_for(n, 8, 132, exact=exact) for n in (1, 16, 64, 256, 1024)]
        assert counts == sorted(counts, reverse=True)
        assert counts[0] == 32 and counts[-1] == 1

"""Shards of every parallel layout in random orders: equal to one quantization at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl.numerics import quantize_block
from vllm_fp8rl.storage.block_grid import BlockGrid, Shard, WriteBatch, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Weight

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@dataclass
class Arrival:
    """A whole HF tensor, how a layer of vLLM hands it on, and this rank's part of it."""

    tensor: torch.Tensor
    load: Callable[[Fp8Weight, torch.Tensor], None]
    local: torch.Tensor


def merged(sizes, columns, rank, ranks, make) -> list[Arrival]:
    arrivals, start = [], 0
    for index, rows in enumerate(sizes):
        keywords = {"shard_id": index, "shard_offset": start, "shard_size": rows, "tp_rank": rank}
        tensor = make(rows * ranks, columns)
        arrivals.append(
            Arrival(
                tensor,
                lambda p, t, k=keywords: p.load_merged_column_weight(loaded_weight=t, **k),
                tensor[rank * rows : (rank + 1) * rows],
            )
        )
        start += rows
    return arrivals


def qkv(head, queries, columns, rank, ranks, replicas, make) -> list[Arrival]:
    """``queries`` query heads and one KV head on each rank; ``replicas`` ranks share a KV head."""
    arrivals, start = [], 0
    for name, heads in (("q", queries), ("k", 1), ("v", 1)):
        rows, part = head * heads, rank if name == "q" else rank // replicas
        keywords = {
            "num_heads": replicas,
            "shard_id": name,
            "shard_offset": start,
            "shard_size": rows,
            "tp_rank": rank,
        }
        tensor = make(rows * (ranks if name == "q" else ranks // replicas), columns)
        arrivals.append(
            Arrival(
                tensor,
                lambda p, t, k=keywords: p.load_qkv_weight(loaded_weight=t, **k),
                tensor[part * rows : (part + 1) * rows],
            )
        )
        start += rows
    return arrivals


def single(rows, columns, rank, ranks, make, *, by_row: bool) -> list[Arrival]:
    tensor = make(rows, columns * ranks) if by_row else make(rows * ranks, columns)
    local = tensor.chunk(ranks, 1 if by_row else 0)[rank]

    def load(parameter: Fp8Weight, whole: torch.Tensor) -> None:
        (parameter.load_row_parallel_weight if by_row else parameter.load_column_parallel_weight)(
            whole
        )

    return [Arrival(tensor, load, local)]


@st.composite
def layers(draw) -> tuple[list[Arrival], int, int]:
    """Arrivals of one layer on one rank, with that rank and their number."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(0, ranks - 1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    dtype = draw(st.sampled_from(DTYPES))
    strided = draw(st.booleans())

    def make(rows: int, columns: int) -> torch.Tensor:
        size = (columns, rows) if strided else (rows, columns)
        tensor = torch.randn(size, generator=generator).to(dtype)
        return tensor.t() if strided else tensor

    width = st.one_of(st.integers(1, 90), st.sampled_from([64, 128, 164]))
    columns = draw(st.one_of(st.integers(1, 140), st.just(128)))
    layout = draw(st.sampled_from(["column", "row", "merged", "merged", "qkv", "qkv"]))
    if layout == "merged":
        sizes = draw(st.lists(width, min_size=2, max_size=4))
        return merged(sizes, columns, rank, ranks, make), rank, ranks
    if layout == "qkv":
        head, replicas = draw(st.integers(8, 130)), draw(st.sampled_from([1, ranks]))
        arrivals = qkv(head, draw(st.integers(1, 3)), columns, rank, ranks, replicas, make)
        return arrivals, rank, ranks
    arrivals = single(draw(width), columns, rank, ranks, make, by_row=layout == "row")
    return arrivals, rank, ranks


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_shards_in_any_order(engine, data):
    """Each from a buffer that is overwritten as soon as its load, or batch, is acknowledged."""
    arrivals, rank, ranks = data.draw(layers())
    scale_format = data.draw(st.sampled_from(["fp32", "pow2"]))
    whole = torch.cat([arrival.local for arrival in arrivals])
    storage = empty_storage(*whole.shape)
    partitions = [len(arrival.local) for arrival in arrivals]
    grid = BlockGrid("layer", lambda: storage, partitions, whole.shape[1], scale_format)
    weight = Fp8Weight(storage[0], grid=grid, weight_loader=print)
    weight.tp_rank, weight.tp_size = rank, ranks

    stale = [(a, torch.full_like(a.tensor, 3.0)) for a in data.draw(st.permutations(arrivals))]
    fresh = [(a, a.tensor) for a in data.draw(st.permutations(arrivals))]
    stream = stale[: data.draw(st.integers(0, len(stale)))] + fresh
    batch = data.draw(st.sampled_from([0, 1, 2, len(stream)]))  # 0: each written at once
    store, buffers, together = weight.store, {}, WriteBatch()

    def put_off(shard: Shard, tensor: torch.Tensor) -> None:
        store(shard, tensor, together)

    def acknowledge() -> None:
        together.run()
        for buffer in buffers.values():
            buffer.fill_(torch.nan)
        buffers.clear()

    if batch:
        weight.store = put_off
    for arrival, tensor in stream:
        if id(arrival) in buffers:  # a shard comes once in a batch
            acknowledge()
        buffers[id(arrival)] = tensor.clone(memory_format=torch.preserve_format)
        arrival.load(weight, buffers[id(arrival)])
        if not batch or len(buffers) == batch:
            acknowledge()
    acknowledge()

    expected = quantize_block(whole, scale_format=scale_format)
    assert torch.equal(storage[0].view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(storage[1], expected.scale_inv)
    assert grid.complete

"""Shards of every parallel layout in random orders: equal to one quantization at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8rl.numerics import quantize_block
from vllm_fp8rl.storage.block_grid import BlockGrid, WriteBatch, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Weight, PlainWeight

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Part(NamedTuple):
    """One HF tensor of a layer, and how a layer of vLLM hands it on."""

    load: str
    keywords: dict[str, Any]
    rows: int
    """Of this rank."""
    number: int
    """Which of the tensor's parts is this rank's."""
    parts: int


@st.composite
def layers(draw) -> tuple[list[Part], int, int]:
    """The HF tensors of one layer on one rank, with that rank and their number."""
    ranks = draw(st.sampled_from([1, 2, 4]))
    rank = draw(st.integers(0, ranks - 1))
    width = st.one_of(st.integers(1, 90), st.sampled_from([64, 128, 164]))
    layout = draw(
        st.sampled_from(["column", "row", "merged_column", "merged_column", "qkv", "qkv"])
    )
    load = (
        f"load_{layout}_parallel_weight" if layout in ("column", "row") else f"load_{layout}_weight"
    )
    if layout in ("column", "row"):
        return [Part(load, {}, draw(width), rank, ranks)], rank, ranks
    if layout == "merged_column":
        sizes = draw(st.lists(width, min_size=2, max_size=4))
        places = [(index, rows, rank, ranks, 1) for index, rows in enumerate(sizes)]
    else:  # a KV head on each rank, or shared by all
        head, queries = draw(st.integers(8, 130)), draw(st.integers(1, 3))
        shared = draw(st.sampled_from([1, ranks]))
        kv = (head, rank // shared, ranks // shared, shared)
        places = [("q", head * queries, rank, ranks, shared), ("k", *kv), ("v", *kv)]
    parts, start = [], 0
    for shard, rows, number, count, replicas in places:
        keywords = {"shard_id": shard, "shard_offset": start, "shard_size": rows, "tp_rank": rank}
        parts.append(Part(load, keywords | {"num_heads": replicas}, rows, number, count))
        start += rows
    return parts, rank, ranks


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 2**16), columns=st.integers(1, 140) | st.just(128))
def test_shards_in_any_order(engine, data, seed, columns):
    """Each from a buffer that is overwritten as soon as its load, or batch, is acknowledged."""
    parts, rank, ranks = data.draw(layers())
    scale_format = data.draw(st.sampled_from(["fp32", "pow2"]))
    dtype, strided = data.draw(st.sampled_from(DTYPES)), data.draw(st.booleans())
    generator = torch.Generator().manual_seed(seed)
    tensors, local = [], []
    for part in parts:
        rows, dim = part.rows, int("row" in part.load)
        size = [rows, columns * part.parts] if dim else [rows * part.parts, columns]
        made = torch.randn(size[::-1] if strided else size, generator=generator).to(dtype)
        tensors.append(made.t() if strided else made)
        local.append(tensors[-1].chunk(part.parts, dim)[part.number])
    whole, rows = torch.cat(local), [part.rows for part in parts]
    storage = empty_storage(*whole.shape)
    grid = BlockGrid("layer", lambda: storage, rows, columns, scale_format)
    weight = Fp8Weight(storage[0], grid=grid, weight_loader=print)
    zeros = torch.zeros(whole.shape)
    plain = PlainWeight(zeros, module="layer", partitions=rows, weight_loader=print)
    for parameter in (weight, plain):
        parameter.tp_rank, parameter.tp_size = rank, ranks

    numbers = range(len(parts))
    stale = [(n, torch.full_like(tensors[n], 3.0)) for n in data.draw(st.permutations(numbers))]
    fresh = [(n, tensors[n]) for n in data.draw(st.permutations(numbers))]
    stream = stale[: data.draw(st.integers(0, len(stale)))] + fresh
    batch = data.draw(st.sampled_from([0, 1, 2, len(stream)]))  # 0: each written at once
    store, buffers, together = weight.store, {}, WriteBatch()
    if batch:
        weight.store = lambda shard, tensor: store(shard, tensor, together)

    def acknowledge() -> None:
        together.run()
        for buffer in buffers.values():
            buffer.fill_(torch.nan)
        buffers.clear()

    for number, tensor in stream:
        if number in buffers:  # a shard comes once in a batch
            acknowledge()
        buffers[number] = tensor.clone(memory_format=torch.preserve_format)
        for parameter in (weight, plain):
            part = parts[number]
            getattr(parameter, part.load)(loaded_weight=buffers[number], **part.keywords)
        if not batch or len(buffers) == batch:
            acknowledge()
    acknowledge()

    expected = quantize_block(whole, scale_format=scale_format)
    assert torch.equal(storage[0].view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(storage[1], expected.scale_inv)
    assert torch.equal(plain, whole.float())
    assert grid.complete and not plain.missing

"""`BlockGrid`: FP8 codes of the wire keep their values or are refused; scales are checked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.numerics import dequantize_block, quantize_block
from support.engine import same_bits
from vllm_fp8rl.storage.block_grid import BlockGrid, Shard, empty_storage


def make_grid(partitions: list[int], columns: int, scale_format: str = "fp32"):
    storage = empty_storage(sum(partitions), columns)
    return BlockGrid("layer", lambda: storage, partitions, columns, scale_format), storage


@settings(max_examples=40)
@given(
    partitions=st.lists(
        st.one_of(st.integers(1, 300), st.sampled_from([128, 256])), min_size=1, max_size=4
    ),
    columns=st.integers(1, 300),
    origin_row=st.sampled_from([0, 128, 64, 200]),
    origin_column=st.sampled_from([0, 128, 40]),
    data=st.data(),
)
def test_codes_keep_their_values_or_are_refused(
    partitions, columns, origin_row, origin_column, data
):
    """Never quantized once more: of the values that come, either all are there or none."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    grid, storage = make_grid(partitions, columns)
    starts = [sum(partitions[:i]) for i in range(len(partitions))]
    arrivals, values, refused = [], {}, set()
    for start, rows in zip(starts, partitions, strict=True):
        full = torch.randn(origin_row + rows, origin_column + columns, generator=generator)
        wire = quantize_block(full)
        values[start] = dequantize_block(*wire)[origin_row:, origin_column:]
        shard = Shard(start, rows, (origin_row, origin_column), tuple(full.shape))
        arrivals += [(grid.write, shard, wire.codes), (grid.write_scales, shard, wire.scale_inv)]
    for write, shard, tensor in data.draw(st.permutations(arrivals)):
        before = [live.clone() for live in storage]
        try:
            write(shard, tensor)
        except UnsupportedError as error:
            assert f"rows from {shard.start}" in str(error) and "BF16" in str(error)
            assert all(map(same_bits, storage, before))
            refused.add(shard.start)
    assert sorted(refused) == grid.missing()
    held = dequantize_block(*storage)
    for start, rows in zip(starts, partitions, strict=True):
        if start not in refused:
            assert torch.equal(held[start : start + rows], values[start])
    if all(at % 128 == 0 for at in (origin_row, origin_column, *starts)):
        assert not refused


def test_source_after_half_an_fp8_pair_wins():
    grid, (codes, _) = make_grid([128], 128)
    whole = torch.randn(128, 128)
    grid.write(grid.whole(0), quantize_block(torch.randn(128, 128)).codes)
    with pytest.raises(RefitError, match="without its 'weight_scale_inv'"):
        grid.require_paired()
    grid.write(grid.whole(0), whole)
    grid.require_paired()
    assert same_bits(codes, quantize_block(whole).codes)


@pytest.mark.parametrize(
    ("scale_format", "value", "message"),
    [
        *(("fp32", bad, "is 0, negative, NaN") for bad in (0.0, torch.nan, torch.inf)),
        ("fp32", 1e36, "makes a code of 448 infinite"),
        ("pow2", 3.0, "no power of two, but the engine .*'pow2'"),
        ("pow2", 2.0**-127 * 1.5, "no power of two"),
    ],
)
def test_scales_that_the_engine_cannot_use(scale_format, value, message):
    grid, (_, scale_inv) = make_grid([256], 128, scale_format)
    with pytest.raises(ScaleError, match=rf"'layer\.weight_scale_inv' has a scale .*{message}"):
        grid.write_scales(grid.whole(0), torch.tensor([[1.0], [value]]))
    assert torch.equal(scale_inv, torch.ones(2, 1))
    good = quantize_block(torch.randn(256, 128) * 2.0**-120, scale_format=scale_format).scale_inv
    grid.write_scales(grid.whole(0), good)
    assert torch.equal(scale_inv, good)

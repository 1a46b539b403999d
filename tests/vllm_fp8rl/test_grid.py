"""`BlockGrid` against one quantization of the whole local matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.numerics import Quantized, dequantize_block, quantize_block
from vllm_fp8rl import grid as grid_module
from vllm_fp8rl.grid import BlockGrid, empty_storage


def make_grid(partitions: list[int], columns: int, scale_format: str = "fp32"):
    storage = empty_storage(sum(partitions), columns)
    return BlockGrid("layer", lambda: storage, partitions, columns, scale_format), storage


def starts_of(partitions: list[int]) -> list[int]:
    return [sum(partitions[:i]) for i in range(len(partitions))]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


widths = st.lists(
    st.one_of(st.integers(1, 300), st.sampled_from([128, 256])), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(
    partitions=widths,
    columns=st.integers(1, 300),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    data=st.data(),
)
def test_any_order_gives_the_codes_of_the_whole_matrix(
    partitions, columns, scale_format, dtype, data
):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    shards = list(zip(starts_of(partitions), partitions, strict=True))
    grid, (codes, scale_inv) = make_grid(partitions, columns, scale_format)
    for _ in range(2):  # the second round is a refit over the first
        whole = torch.randn(sum(partitions), columns, generator=generator).to(dtype)
        for start, rows in data.draw(st.permutations(shards)):
            grid.load_source(start, whole[start : start + rows])
        expected = quantize_block(whole, scale_format=scale_format)
        assert same_bits(codes, expected.codes)
        assert same_bits(scale_inv, expected.scale_inv)
        assert grid.complete


@settings(max_examples=40, deadline=None)
@given(
    partitions=widths,
    columns=st.integers(1, 300),
    origin_row=st.sampled_from([0, 128, 64, 200]),
    origin_column=st.sampled_from([0, 128, 40]),
    data=st.data(),
)
def test_fp8_wire_keeps_whole_blocks_and_requantizes_shared_ones(
    partitions, columns, origin_row, origin_column, data
):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    grid, (codes, scale_inv) = make_grid(partitions, columns)
    values = torch.empty(sum(partitions), columns)
    kept: list[tuple[int, int, Quantized, int]] = []
    arrivals = []
    for start, rows in zip(starts_of(partitions), partitions, strict=True):
        full = torch.randn(origin_row + rows, origin_column + columns, generator=generator)
        wire = quantize_block(full)
        part = wire.codes[origin_row:, origin_column:]
        values[start : start + rows] = dequantize_block(*wire)[origin_row:, origin_column:]
        arrivals += [(grid.load_codes, start, part), (grid.load_scales, start, wire.scale_inv)]
        if (origin_row - start) % 128 == 0 and origin_column % 128 == 0:
            kept.append((start, rows, wire, origin_row))
    for load, start, tensor in data.draw(st.permutations(arrivals)):
        load(start, tensor, (origin_row, origin_column))
    assert grid.complete
    expected = quantize_block(values)
    expected_codes, expected_scales = expected.codes.clone(), expected.scale_inv.clone()
    boundaries = [s for s in starts_of(partitions) if s % 128]
    for start, rows, wire, row0 in kept:
        for block in range(start // 128, -(-(start + rows) // 128)):
            lo, hi = block * 128, min(block * 128 + 128, sum(partitions))
            if lo < start or hi > start + rows or any(lo < b < hi for b in boundaries):
                continue  # shared with a neighbour
            first = (row0 + lo - start) // 128
            column = origin_column // 128
            expected_scales[block] = wire.scale_inv[first, column:]
            inside = wire.codes[row0 + lo - start : row0 + hi - start, origin_column:]
            expected_codes[lo:hi] = inside
    assert same_bits(codes, expected_codes)
    assert same_bits(scale_inv, expected_scales)


def test_chunks_do_not_change_codes(monkeypatch):
    whole = torch.randn(700, 130)
    results = []
    for chunk in (1, 1 << 30):
        monkeypatch.setitem(grid_module._CHUNK_ELEMENTS, "cpu", chunk)
        grid, storage = make_grid([700], 130)
        grid.load_source(0, whole)
        results.append(storage)
    assert same_bits(results[0][0], results[1][0])
    assert same_bits(results[0][1], results[1][1])


def test_source_after_half_an_fp8_pair_wins():
    grid, (codes, _) = make_grid([128], 128)
    whole = torch.randn(128, 128)
    grid.load_codes(0, quantize_block(torch.randn(128, 128)).codes, (0, 0))
    with pytest.raises(RefitError, match="without its 'weight_scale_inv'"):
        grid.require_paired()
    grid.load_source(0, whole)
    grid.require_paired()
    assert same_bits(codes, quantize_block(whole).codes)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_scale_is_refused(bad):
    grid, (_, scale_inv) = make_grid([256], 128)
    scales = torch.tensor([[1.0], [bad]])
    with pytest.raises(ScaleError, match=r"layer\.weight_scale_inv"):
        grid.load_scales(0, scales, (0, 0))
    assert torch.equal(scale_inv, torch.ones(2, 1))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_other_dtypes_are_refused_not_cast(dtype):
    grid, _ = make_grid([128], 128)
    with pytest.raises(UnsupportedError, match=str(dtype)):
        grid.load_source(0, torch.zeros(128, 128).to(dtype))


def test_wrong_shape_is_refused():
    grid, _ = make_grid([128, 64], 128)
    with pytest.raises(RefitError, match=r"\(64, 128\)"):
        grid.load_source(128, torch.zeros(65, 128))

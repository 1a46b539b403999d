"""`ExpertGrids` against one quantization of each rank-local matrix; no engine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.numerics import FP8_DTYPE, Quantized, cdiv, dequantize_block, quantize_block
from support.engine import same_bits
from vllm_fp8rl.storage.block_grid import WriteBatch
from vllm_fp8rl.storage.experts import (
    MATRICES,
    ExpertGrids,
    ExpertLayout,
    PlainExperts,
    empty_stacks,
)

HIDDEN = 200
FULL = (128, HIDDEN)
"""Of an expert's gate or up that is a block high."""


def made(
    experts: int,
    width: int,
    scale_format: str = "fp32",
    *,
    rank: int = 0,
    ranks: int = 1,
    local: dict[int, int] | None = None,
) -> tuple[ExpertGrids, ExpertLayout, dict[str, torch.Tensor]]:
    """Grids, layout and stacks; ``width`` is that of one rank's part of an expert."""
    numbers = local if local is not None else {number: number for number in range(experts)}
    padded = cdiv(width, 128) * 128
    layout = ExpertLayout("moe.experts", numbers, experts, HIDDEN, width, padded, rank, ranks)
    stacks = empty_stacks(layout)
    device = torch.device("cpu")
    grids = ExpertGrids(layout, stacks.__getitem__, scale_format, device, lambda: None)
    return grids, layout, stacks


def matrices(layout: ExpertLayout, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        (expert, slot): torch.randn(layout.shard(slot).full, generator=generator).bfloat16()
        for expert in range(layout.total)
        for slot in MATRICES
    }


def padded_part(layout: ExpertLayout, tensor: torch.Tensor, slot: str) -> torch.Tensor:
    part = tensor.chunk(layout.tp_size, 1 if slot == "w2" else 0)[layout.tp_rank]
    extra = layout.padded - layout.intermediate
    return torch.nn.functional.pad(part, (0, extra) if slot == "w2" else (0, 0, 0, extra))


def held(layout: ExpertLayout, stacks: dict, number: int, slot: str) -> Quantized:
    """What a kernel reads, padding and all, sliced here by hand."""
    if slot == "w2":
        return Quantized(stacks["w2_weight"][number], stacks["w2_weight_scale_inv"][number])
    first = layout.padded if slot == "w3" else 0
    codes = stacks["w13_weight"][number, first : first + layout.padded]
    scales = stacks["w13_weight_scale_inv"][number, first // 128 : (first + layout.padded) // 128]
    return Quantized(codes, scales)


@settings(max_examples=40)
@given(
    width=st.sampled_from([64, 96, 128, 192, 300]),
    ranks=st.integers(1, 3),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    data=st.data(),
)
def test_any_order_gives_the_codes_of_each_local_matrix(width, ranks, scale_format, data):
    rank = data.draw(st.integers(0, ranks - 1))
    grids, layout, stacks = made(3, width, scale_format, rank=rank, ranks=ranks)
    if rank == 0:  # codes that wait for their scales: weights take their place
        grids.load(0, "w1", matrices(layout, 0)[0, "w1"].to(FP8_DTYPE))
    for seed in (1, 2):  # the second round is a refit over the first
        tensors, batch = matrices(layout, seed), WriteBatch() if data.draw(st.booleans()) else None
        for key in data.draw(st.permutations(sorted(tensors))):
            assert seed == 2 or not grids.complete
            grids.load(*key, tensors[key], batch)
        if batch:
            batch.run()
        grids.require_paired()
        assert grids.complete and not grids.missing()
        for (expert, slot), tensor in tensors.items():
            part = padded_part(layout, tensor, slot)
            expected = quantize_block(part, scale_format=scale_format)
            assert all(map(same_bits, held(layout, stacks, expert, slot), expected))


@settings(max_examples=30)
@given(width=st.sampled_from([96, 128, 192]), ranks=st.integers(1, 3), data=st.data())
def test_codes_and_scales_in_any_order(width, ranks, data):
    """Codes as they are where blocks of the wire are local blocks; else none is taken."""
    rank = data.draw(st.integers(0, ranks - 1))
    grids, layout, stacks = made(2, width, rank=rank, ranks=ranks)
    aligned = (rank * width) % 128 == 0
    assert [layout.codes_fit(slot) for slot in MATRICES] == [aligned] * 3
    wire = {key: quantize_block(tensor) for key, tensor in matrices(layout, 3).items()}
    loads = [(grids.load, key, codes) for key, (codes, _) in wire.items()]
    loads += [(grids.load_scales, key, scale_inv) for key, (_, scale_inv) in wire.items()]
    for load, key, tensor in data.draw(st.permutations(loads)):
        if aligned:
            load(*key, tensor)
            continue
        with pytest.raises(UnsupportedError, match=r"moe\.experts\..*cannot take FP8 codes"):
            load(*key, tensor)
    grids.require_paired()
    assert grids.complete == aligned
    if not aligned:
        assert not any(stacks[name].view(torch.uint8).any() for name in ("w13_weight", "w2_weight"))
        return
    for (expert, slot), quantized in wire.items():
        live = held(layout, stacks, expert, slot)
        whole = padded_part(layout, dequantize_block(*quantized), slot)
        assert torch.equal(dequantize_block(*live), whole)


def test_unpaired_codes_are_known_and_forgotten():
    grids, *_ = made(2, 128)
    codes, scale_inv = quantize_block(torch.randn(FULL))
    grids.load(1, "w3", codes)
    with pytest.raises(RefitError, match=r"'moe.experts.1.up_proj' received FP8 'weight' without"):
        grids.require_paired()
    grids.forget_unpaired()
    grids.require_paired()
    grids.load_scales(1, "w3", scale_inv)
    with pytest.raises(RefitError, match="'weight_scale_inv' without its 'weight'"):
        grids.require_paired()


FREE_SCALES = torch.full((1, 2), 0.7)


@pytest.mark.parametrize(
    ("load", "key", "tensor", "error", "message"),
    [
        ("load", (1, "w2"), torch.zeros(FULL), RefitError, r"1.down_proj.weight' takes .*200, 128"),
        ("load_scales", (0, "w1"), FREE_SCALES.t(), RefitError, r"weight_scale_inv' takes .*1, 2"),
        ("load", (0, "w1"), torch.zeros(FULL).char(), UnsupportedError, "0.gate_proj' got .*int8"),
        ("load_scales", (0, "w3"), FREE_SCALES, ScaleError, "0.up_proj.weight_scale_inv.*power of"),
    ],
    ids=["shape", "shape of scales", "dtype", "format of scales"],
)
def test_what_does_not_fit_is_refused_by_name(load, key, tensor, error, message):
    grids, layout, stacks = made(2, 128, "pow2")
    with pytest.raises(error, match=message):
        getattr(grids, load)(*key, tensor)
    assert not any(stacks[name].view(torch.uint8).any() for name in ("w13_weight", "w2_weight"))
    assert stacks["w13_weight_scale_inv"].eq(1).all()
    plain = PlainExperts(layout, {"w13_weight": torch.zeros(2, 256, HIDDEN)}.__getitem__)
    with pytest.raises(UnsupportedError, match=r"gate_proj.weight' is kept in BF16 but arrives"):
        plain.load(0, "w1", torch.zeros(FULL).to(FP8_DTYPE))

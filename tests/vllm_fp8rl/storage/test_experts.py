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


def layout_of(
    experts: int, width: int, *, rank: int = 0, ranks: int = 1, local: dict[int, int] | None = None
) -> ExpertLayout:
    """``width``: of one rank's part of an expert."""
    numbers = local if local is not None else {number: number for number in range(experts)}
    padded = cdiv(width, 128) * 128
    return ExpertLayout("moe.experts", numbers, experts, HIDDEN, width, padded, rank, ranks)


def grids_of(layout: ExpertLayout, scale_format: str = "fp32"):
    stacks = empty_stacks(layout)
    return ExpertGrids(
        layout, stacks.__getitem__, scale_format, torch.device("cpu"), _ignore
    ), stacks


def _ignore() -> None:
    pass


def matrices(layout: ExpertLayout, seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        (expert, slot): torch.randn(layout.shard(slot).full, generator=generator).bfloat16()
        for expert in range(layout.total)
        for slot in MATRICES
    }


def local_part(layout: ExpertLayout, tensor: torch.Tensor, slot: str) -> torch.Tensor:
    return tensor.chunk(layout.tp_size, 1 if slot == "w2" else 0)[layout.tp_rank]


def held(layout: ExpertLayout, stacks: dict, number: int, slot: str) -> Quantized:
    """What a kernel reads, padding and all, sliced here by hand."""
    if slot == "w2":
        return Quantized(stacks["w2_weight"][number], stacks["w2_weight_scale_inv"][number])
    first = layout.padded if slot == "w3" else 0
    codes = stacks["w13_weight"][number, first : first + layout.padded]
    scales = stacks["w13_weight_scale_inv"][number, first // 128 : (first + layout.padded) // 128]
    return Quantized(codes, scales)


def padded(layout: ExpertLayout, part: torch.Tensor, slot: str) -> torch.Tensor:
    extra = layout.padded - layout.intermediate
    sides = (0, extra) if slot == "w2" else (0, 0, 0, extra)
    return torch.nn.functional.pad(part, sides)


@settings(max_examples=40)
@given(
    width=st.sampled_from([64, 96, 128, 192, 256, 300]),
    ranks=st.integers(1, 3),
    scale_format=st.sampled_from(["fp32", "pow2"]),
    data=st.data(),
)
def test_any_order_gives_the_codes_of_each_local_matrix(width, ranks, scale_format, data):
    rank = data.draw(st.integers(0, ranks - 1))
    layout = layout_of(3, width, rank=rank, ranks=ranks)
    grids, stacks = grids_of(layout, scale_format)
    for seed in (1, 2):  # the second round is a refit over the first
        tensors = matrices(layout, seed)
        for key in data.draw(st.permutations(sorted(tensors))):
            grids.load(*key, tensors[key])
        assert grids.complete and not grids.missing()
        for (expert, slot), tensor in tensors.items():
            part = padded(layout, local_part(layout, tensor, slot), slot)
            expected = quantize_block(part, scale_format=scale_format)
            for found, wanted in zip(held(layout, stacks, expert, slot), expected, strict=True):
                assert same_bits(found, wanted)


def test_a_weight_of_a_batch_takes_the_place_of_codes_that_wait():
    grids, _ = grids_of(layout_of(1, 128))
    tensors, batch = matrices(grids.layout, 6), WriteBatch()
    grids.load(0, "w1", quantize_block(tensors[0, "w1"]).codes)
    for key, tensor in tensors.items():
        assert not grids.complete
        grids.load(*key, tensor, batch)
    batch.run()
    grids.require_paired()
    assert grids.complete


@settings(max_examples=30)
@given(width=st.sampled_from([96, 128, 192]), ranks=st.integers(1, 3), data=st.data())
def test_codes_and_scales_in_any_order(width, ranks, data):
    """Codes as they are where blocks of the wire are local blocks; else none is taken."""
    rank = data.draw(st.integers(0, ranks - 1))
    layout = layout_of(2, width, rank=rank, ranks=ranks)
    grids, stacks = grids_of(layout)
    aligned = (rank * width) % 128 == 0
    assert [layout.codes_fit(slot) for slot in MATRICES] == [aligned] * 3
    wire = {key: quantize_block(tensor) for key, tensor in matrices(layout, 3).items()}
    pieces = [(key, piece) for key in sorted(wire) for piece in ("codes", "scales")]
    for key, piece in data.draw(st.permutations(pieces)):
        load, tensor = grids.load, wire[key].codes
        if piece == "scales":
            load, tensor = grids.load_scales, wire[key].scale_inv
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
    for (expert, slot), (codes, scale_inv) in wire.items():
        live = held(layout, stacks, expert, slot)
        whole = local_part(layout, dequantize_block(codes, scale_inv), slot)
        assert torch.equal(dequantize_block(*live), padded(layout, whole, slot))


def test_scales_of_another_format_are_refused():
    grids, stacks = grids_of(layout_of(1, 128), "pow2")
    scale_inv = quantize_block(torch.randn(128, HIDDEN)).scale_inv
    with pytest.raises(ScaleError, match=r"experts\.0\.up_proj\.weight_scale_inv.*power of two"):
        grids.load_scales(0, "w3", scale_inv)
    assert torch.equal(stacks["w13_weight_scale_inv"], torch.ones(1, 2, 2))


def test_expert_parallel_ranks_keep_their_own_and_name_what_lacks():
    """Round-robin placement, as vLLM's expert map may have it: expert 3 is number 1 of rank 1."""
    everything = matrices(layout_of(5, 128), 4)
    for rank in (0, 1):
        local = {expert: expert // 2 for expert in range(5) if expert % 2 == rank}
        layout = layout_of(5, 128, local=local)
        grids, stacks = grids_of(layout)
        assert stacks["w13_weight"].shape[0] == len(local) == 3 - rank
        assert len(grids.missing()) == 3 * len(local)
        for (expert, slot), tensor in everything.items():
            if expert in local:
                grids.load(expert, slot, tensor)
        for expert, number in local.items():
            for slot in MATRICES:
                wanted = quantize_block(everything[expert, slot])
                for found, value in zip(held(layout, stacks, number, slot), wanted, strict=True):
                    assert same_bits(found, value)
        assert grids.complete


def test_unpaired_codes_are_known_and_forgotten():
    grids, _ = grids_of(layout_of(2, 128))
    codes, scale_inv = quantize_block(torch.randn(128, HIDDEN))
    grids.load(1, "w3", codes)
    with pytest.raises(RefitError, match=r"'moe.experts.1.up_proj' received FP8 'weight' without"):
        grids.require_paired()
    grids.forget_unpaired()
    grids.require_paired()
    grids.load_scales(1, "w3", scale_inv)
    with pytest.raises(RefitError, match="'weight_scale_inv' without its 'weight'"):
        grids.require_paired()


def test_what_does_not_fit_is_refused_by_name():
    layout = layout_of(2, 128)
    grids, stacks = grids_of(layout)
    with pytest.raises(RefitError, match=r"experts.1.down_proj.weight' takes .*\(200, 128\)"):
        grids.load(1, "w2", torch.zeros(128, HIDDEN))
    with pytest.raises(RefitError, match=r"gate_proj.weight_scale_inv' takes .*\(1, 2\)"):
        grids.load_scales(0, "w1", torch.ones(2, 1))
    with pytest.raises(UnsupportedError, match=r"experts.0.gate_proj' got .*int8"):
        grids.load(0, "w1", torch.zeros(128, HIDDEN, dtype=torch.int8))
    plain = PlainExperts(layout, {"w13_weight": torch.zeros(2, 256, HIDDEN)}.__getitem__)
    with pytest.raises(UnsupportedError, match=r"gate_proj.weight' is kept in BF16 but arrives"):
        plain.load(0, "w1", torch.zeros(128, HIDDEN).to(FP8_DTYPE))
    assert not any(stacks[name].view(torch.uint8).any() for name in ("w13_weight", "w2_weight"))

"""TP=2 over vLLM's multiprocess executor, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.numerics import dequantize_block, quantize_block
from support.engine import PROMPTS, load_tensors, make_checkpoint, same_bits
from support.processes import run_script
from vllm_fp8rl.storage.block_grid import BlockGrid, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight, PlainWeight
from vllm_fp8rl.testing.hf_reference import observed_kv_scales

SCRIPT = Path(__file__).with_name("tp_refit.py")


@pytest.mark.timeout(600)
def test_two_ranks(tmp_path):
    # 328 columns of gate and up make 164 a rank: their boundary lies within a block.
    for seed, name in enumerate("ab"):
        make_checkpoint(tmp_path / name, 40 + seed, intermediate_size=328)
    found = run_script(SCRIPT, tmp_path, timeout=540)
    assert found["codes"] is True
    assert found["there_and_back"] is True
    assert found["recovered"] is True
    assert found["pointers"] is True
    files, missing, serves = found["different files"]
    assert "'model.safetensors' is not the same for rank 1 as for rank 0" in files
    assert "'here' is no safetensors file" in missing
    assert serves is True
    codes = found["codes of gate"]
    assert codes.startswith("RefitError: 'model.layers.0.mlp.gate_proj.weight")
    assert found["lacks scales"] == [True, False]
    assert found["held"] == [found["calibrated"]] * 2
    assert found["calibrated_by_functions"] == found["calibrated"]
    for name, value in observed_kv_scales(tmp_path / "a", Recipe(), PROMPTS).items():
        # Each rank sees half of the heads; transformers keeps K and V of layer 0 as they are.
        tolerance = 1e-3 if ".layers.0." in name else 0.05
        assert found["calibrated"][name] == pytest.approx(value, rel=tolerance), name
    assert found["scaled_back"] is True
    assert found["tensors"] == len(load_tensors(tmp_path / "a")) + 4
    nan, refused, zero = found["errors"]
    assert nan.startswith("RefitError: 'model.layers.1.mlp.up_proj.weight' has NaN")
    assert refused.startswith("RefitError: The weights are half-updated")
    assert zero.startswith("ScaleError: KV scale 'model.layers.0.self_attn.k_scale' is 0")
    killed, refused = found["killed"]
    assert "failed on a worker" in killed and killed.endswith("died, restart the engine.")
    assert refused.startswith("RefitError: The weights are half-updated")


def layer_parameters(engine, partitions: list[int], columns: int, rank: int, ranks: int):
    """Parameters as on one of ``ranks`` ranks; the engine's process groups have one."""
    assert engine.recipe == Recipe()
    storage = empty_storage(sum(partitions), columns)
    grid = BlockGrid("layer", lambda: storage, partitions, columns, "fp32")
    shape = (sum(partitions), columns)
    weight = Fp8Weight(storage[0], grid=grid, weight_loader=print)
    scale = Fp8Scale(storage[1], grid=grid, weight_loader=print)
    plain = PlainWeight(
        torch.zeros(shape), module="layer", partitions=partitions, weight_loader=print
    )
    for parameter in (weight, scale, plain):
        parameter.tp_rank, parameter.tp_size = rank, ranks
    return weight, scale, plain, storage


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("wire", ["bf16", "fp8"])
def test_replicated_kv_heads_and_every_layout(engine, ranks, wire):
    """Four query heads and two KV heads: with four ranks each KV head lies on two."""
    torch.manual_seed(ranks)
    head, hidden = (128 if wire == "fp8" else 64), 512  # codes need blocks of the rank's own
    q, k, v = (torch.randn(n * head, hidden, dtype=torch.bfloat16) for n in (4, 2, 2))
    full = torch.randn(512, hidden, dtype=torch.bfloat16)
    for rank in range(ranks):
        replicas = max(1, ranks // 2)
        rows = {"q": 4 // ranks * head, "k": head * 2 // min(2, ranks)}
        rows["v"] = rows["k"]
        partitions = list(rows.values())
        weight, scale, plain, storage = layer_parameters(engine, partitions, hidden, rank, ranks)
        start, local = 0, []
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            shard = {
                "shard_id": name,
                "shard_offset": start,
                "shard_size": rows[name],
                "num_heads": replicas,
            }
            part = rank if name == "q" else rank // replicas
            local.append(tensor[part * rows[name] :][: rows[name]])
            found = weight.shard(start, rows[name], (len(tensor), hidden))
            assert found.origin == (part * rows[name], 0)
            plain.load_qkv_weight(tensor, **shard)
            if wire == "fp8":
                quantized = quantize_block(tensor)
                local[-1] = dequantize_block(*quantized)[part * rows[name] :][: rows[name]]
                scale.load_qkv_weight(quantized.scale_inv, **shard)
                weight.load_qkv_weight(quantized.codes, **shard)
            else:
                weight.load_qkv_weight(tensor, **shard)
                assert torch.equal(plain[start : start + rows[name]], local[-1].float())
            start += rows[name]
        matrix = torch.cat(local).float()
        assert weight.grid.complete
        if wire == "fp8":
            assert torch.equal(dequantize_block(*storage), matrix)
        else:
            assert same_bits(storage[0], quantize_block(matrix).codes)
            assert same_bits(storage[1], quantize_block(matrix).scale_inv)

        column, _, _, codes = layer_parameters(engine, [512 // ranks], hidden, rank, ranks)
        column.load_column_parallel_weight(full)
        assert same_bits(codes[0], quantize_block(full.chunk(ranks, 0)[rank]).codes)
        row, _, _, codes = layer_parameters(engine, [512], hidden // ranks, rank, ranks)
        row.load_row_parallel_weight(full)
        assert same_bits(codes[0], quantize_block(full.chunk(ranks, 1)[rank]).codes)
        assert same_bits(codes[1], quantize_block(full.chunk(ranks, 1)[rank]).scale_inv)
        rows = 512 // ranks
        assert column.shard(0, rows, (512, hidden)).origin == (rank * rows, 0)
        assert row.shard(0, 512, (512, hidden)).origin == (0, rank * (hidden // ranks))

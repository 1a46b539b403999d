"""TP=2 over vLLM's multiprocess executor, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.numerics import dequantize_block, quantize_block
from support.engine import PROMPTS, load_tensors, make_checkpoint
from support.gaps import observed_kv_scales
from support.processes import answer, run_forked
from vllm_fp8rl.storage.block_grid import BlockGrid, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight, PlainWeight

SCRIPT = Path(__file__).with_name("tp_refit.py")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("two-ranks")
    # 328 columns of gate and up make 164 a rank: their boundary lies within a block.
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, 40 + seed, intermediate_size=328)
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> dict[str, Any]:
    """What one engine over two ranks said, in the order of the script."""
    return answer(run_forked(SCRIPT, root, timeout=540))


def test_each_rank_has_its_codes_through_refits_in_place(found, root):
    assert found["codes"] is True
    assert found["there_and_back"] is True
    assert found["pointers"] is True
    assert found["tensors"] == len(load_tensors(root / "a")) + 4


def test_files_must_be_the_same_on_every_rank(found):
    files, missing, serves = found["different files"]
    assert "'model.safetensors' is not the same for rank 1 as for rank 0" in files
    assert "'here' cannot be read (No such file or directory)" in missing
    assert serves is True


def test_codes_whose_blocks_the_ranks_share_are_refused(found):
    assert found["codes of gate"].startswith("RefitError: 'model.layers.0.mlp.gate_proj.weight")


def test_kv_scales_are_those_of_all_heads(found, root):
    assert found["lacks scales"] == [True, False]
    assert found["held"] == [found["calibrated"]] * 2
    assert found["calibrated_by_functions"] == found["calibrated"]
    for name, value in observed_kv_scales(root / "a", Recipe(), PROMPTS).items():
        # Each rank sees half of the heads; transformers keeps K and V of layer 0 as they are.
        tolerance = 1e-3 if ".layers.0." in name else 0.05
        assert found["calibrated"][name] == pytest.approx(value, rel=tolerance), name
    assert found["scaled_back"] is True


def test_a_fault_on_any_rank_closes_the_engine_until_a_complete_refit(found):
    nan, refused, zero = found["errors"]
    assert nan.startswith("RefitError: 'model.layers.1.mlp.up_proj.weight' has NaN")
    assert refused.startswith("RefitError: The weights are half-updated")
    assert zero.startswith("ScaleError: KV scale 'model.layers.0.self_attn.k_scale' is 0")
    assert found["recovered"] is True


def test_an_update_that_one_rank_refuses_ends_on_all(found):
    """vLLM took it for active still on the others, where the next could not start."""
    error, served = found["one rank's update"]
    assert "'model.norm.weight' has NaN" in error or "must be a mapping" in error  # before 0.29
    assert served is True


def test_a_killed_rank_is_an_error_not_a_wait(found):
    killed, refused = found["killed"]
    assert "failed on a worker" in killed and killed.endswith("died, restart the engine.")
    assert refused.startswith("RefitError: The weights are half-updated")


@pytest.mark.parametrize("rank", range(4))
def test_replicated_kv_heads(engine, rank):
    """Four query heads and two KV heads: with four ranks each KV head lies on two."""
    assert engine.recipe == Recipe()  # the parameters ask for its process group
    torch.manual_seed(0)
    rows, hidden = 128, 512
    whole = {p: torch.randn(n * rows, hidden).bfloat16() for p, n in (("q", 4), ("k", 2), ("v", 2))}
    storage, partitions = empty_storage(3 * rows, hidden), [rows] * 3
    grid = BlockGrid("layer", lambda: storage, partitions, hidden, "fp32")
    weight = Fp8Weight(storage[0], grid=grid, weight_loader=print)
    scale = Fp8Scale(storage[1], grid=grid, weight_loader=print)
    zeros = torch.zeros(3 * rows, hidden)
    plain = PlainWeight(zeros, module="layer", partitions=partitions, weight_loader=print)
    for parameter in (weight, scale, plain):
        parameter.tp_rank, parameter.tp_size = rank, 4
    local, of_codes = [], []
    for index, (name, tensor) in enumerate(whole.items()):
        shard = {"shard_id": name, "shard_offset": index * rows, "shard_size": rows}
        shard["num_heads"] = 2  # ranks that share a KV head
        part = slice((rank if name == "q" else rank // 2) * rows, None)
        codes, scale_inv = quantize_block(tensor)
        local.append(tensor[part][:rows].float())
        of_codes.append(dequantize_block(codes, scale_inv)[part][:rows])
        plain.load_qkv_weight(tensor, **shard)
        scale.load_qkv_weight(scale_inv, **shard)
        weight.load_qkv_weight(codes, **shard)
    assert torch.equal(plain, torch.cat(local)) and not plain.missing
    assert torch.equal(dequantize_block(*storage), torch.cat(of_codes)) and grid.complete

"""TP=2 over vLLM's multiprocess executor, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.numerics import dequantize_block, quantize_block
from support.cases import names_of
from support.engine import make_checkpoint
from support.processes import answer, run_forked
from vllm_fp8rl.storage.block_grid import BlockGrid, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight

SCRIPT = Path(__file__).with_name("tp_refit.py")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each case failed, if it did."""
    root = tmp_path_factory.mktemp("two-ranks")
    # 328 columns of gate and up make 164 a rank: their boundary lies within a block.
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, 40 + seed, intermediate_size=328)
    return answer(run_forked(SCRIPT, root, timeout=540))


@pytest.mark.parametrize("case", names_of(SCRIPT))
def test_refit_over_two_ranks(failures, case):
    assert not failures[case], failures[case]


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
    for parameter in (weight, scale):
        parameter.tp_rank, parameter.tp_size = rank, 4
    local = []
    for index, (name, tensor) in enumerate(whole.items()):
        shard = {"shard_id": name, "shard_offset": index * rows, "shard_size": rows}
        shard["num_heads"] = 2  # ranks that share a KV head
        part = slice((rank if name == "q" else rank // 2) * rows, None)
        codes, scale_inv = quantize_block(tensor)
        local.append(dequantize_block(codes, scale_inv)[part][:rows])
        scale.load_qkv_weight(scale_inv, **shard)
        weight.load_qkv_weight(codes, **shard)
    assert torch.equal(dequantize_block(*storage), torch.cat(local)) and grid.complete

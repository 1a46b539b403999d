"""Expert parallel over two ranks (gloo), in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.engine import PROMPTS
from support.mla import ALL, ON_A_CPU, SHAPES
from support.processes import run_script
from support.teacher_forced import vllm_logprobs
from support.towers import TEXT_ONLY
from vllm_fp8rl.testing.hf_reference import gap
from vllm_fp8rl.testing.tiny import (
    make_mla_checkpoint,
    make_moe_checkpoint,
    make_qwen35_checkpoint,
)

SCRIPT = Path(__file__).with_name("tp_moe.py")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("experts_on_a_cpu")
def test_two_ranks(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        make_moe_checkpoint(tmp_path / name, 40 + seed, moe_intermediate_size=192)
    found = run_script(SCRIPT, tmp_path, timeout=540)
    assert found["codes"] is True
    assert found["there_and_back"] is True
    assert found["recovered"] is True
    assert found["pointers"] is True
    lacks, refused = found["errors"]
    assert lacks.startswith("RefitError: The refit lacks 1 of the model's tensors: 'model.layers.1")
    assert refused.startswith("RefitError: The weights are half-updated")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("experts_on_a_cpu")
def test_multi_latent_attention_over_two_ranks(moe_engine, tmp_path: Path) -> None:
    """Before and after refits the tokens are those of one rank, but for a flipped code or two."""
    paths = [
        make_mla_checkpoint(tmp_path / name, 50 + seed, **SHAPES["v3"])
        for seed, name in enumerate("ab")
    ]
    a, b, again = run_script(SCRIPT.with_name("tp_mla.py"), tmp_path, timeout=540)["tokens"]
    assert a == again != b
    alone = [moe_engine(path, ALL, **ON_A_CPU).greedy(PROMPTS) for path in paths]
    for one, two in zip(alone, (a, b), strict=True):
        pairs = [pair for row in zip(one, two, strict=True) for pair in zip(*row, strict=True)]
        assert sum(x == y for x, y in pairs) > 0.6 * len(pairs)  # all of them, mostly


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("experts_on_a_cpu")
def test_gated_delta_nets_over_two_ranks(moe_engine, monkeypatch, tmp_path: Path) -> None:
    """As near to one rank as codes that flip allow: ranks sum in another order."""
    pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers has no Qwen3.5")
    from support.gated_delta_net import compute_in_float32

    # Whole blocks on each rank: the same codes as on one.
    shape = {"experts": True, "vision": True, "shared_expert_intermediate_size": 256}
    paths = [
        make_qwen35_checkpoint(tmp_path / name, 60 + seed, **shape)
        for seed, name in enumerate("ab")
    ]
    found = run_script(SCRIPT.with_name("tp_qwen35.py"), tmp_path, timeout=540)
    a, b, again = (torch.tensor(each) for each in found["logprobs"])
    assert torch.equal(a, again)
    compute_in_float32(monkeypatch)
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    for path, two in zip(paths, (a, b), strict=True):
        one = vllm_logprobs(moe_engine(path, recipe, **TEXT_ONLY))
        assert gap(one, two).mean < 0.02 * gap(a, b).mean, gap(one, two)

"""Families with experts in live CPU engines: against transformers, and through refits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from vllm.config import set_current_vllm_config

from fp8rl import Recipe
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.models.families import kind_of
from fp8rl.recipe import KVCache, Pins
from support.engine import Engine, load_tensors
from support.gaps import gap
from support.hf_reference import Attention, load_reference
from support.mla import NATIVE_ROPE, ON_A_CPU
from support.teacher_forced import FACTOR, PROMPTS, vllm_logprobs
from support.tiny import make_family_checkpoint
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.quantization import checks
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory

pytestmark = pytest.mark.usefixtures("experts_on_a_cpu")

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
PUBLISHED = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(kinds=("a_proj", "b_proj")))
"""As in NeMo RL's configs of models with multi-latent attention."""


CASES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"head_dim": 64},
    "mixtral": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "glm4_moe_lite": {
        "kv_lora_rank": 512,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "head_dim": 64,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
}
QUICK = ("minimax_m2", "glm4_moe_lite")
"""A router of sigmoids with a bias; multi-latent attention with a low rank for queries."""


def with_grouped_router(engine: Engine) -> None:
    """Let vLLM's router for CPUs choose by sigmoids and a bias: as one group of all experts."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter  # from 0.30 on

    for module in engine.model.modules():
        if isinstance(router := getattr(module, "router", None), CPURouter):
            router.use_grouped_topk = True
            router.num_expert_group = router.topk_group = 1


def test_a_router_that_fails_on_a_cpu_is_refused(
    moe_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    path = make_family_checkpoint(tmp_path, 0, "minimax_m2")
    with pytest.raises(UnsupportedError, match="no sigmoid without groups, which 'minimax_m2'"):
        moe_engine(path, RECIPE)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in CASES],
)
def test_equals_transformers_through_refits(
    kind: str,
    moe_engine: Callable[..., Engine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "check_cpu_scoring", lambda spec: None)
    paths = {
        name: make_family_checkpoint(tmp_path / name, seed, kind, **CASES[kind])
        for seed, name in enumerate("ab")
    }
    tensors = {name: load_tensors(path) for name, path in paths.items()}
    latent = kind == "glm4_moe_lite"
    recipe = PUBLISHED if latent else RECIPE
    arguments = ON_A_CPU if latent else {"compilation_config": NATIVE_ROPE}
    engine = moe_engine(paths["a"], recipe, **arguments)
    if kind == "minimax_m2":
        with_grouped_router(engine)
    before, said = engine.pointers(), []
    inventory = Inventory.of(engine.model)
    assert set(tensors["a"]) == {n for n, entry in inventory.entries.items() if entry.required}
    slow = {kind_of(n.rpartition(".")[0]) for n in tensors["a"] if not inventory.routes([n])}
    assert slow <= {"router", "norm", "linear"}  # these go through vLLM's own loaders
    expected, others = (
        [load_reference(path, recipe, attention=way).many(PROMPTS) for path in paths.values()]
        for way in get_args(Attention)
    )
    # Of both checkpoints: few flips make the floor of one, and they differ from CPU to CPU.
    floor = gap(torch.cat(expected), torch.cat(others))
    for turn, name in enumerate("aba"):
        if said:
            refit(engine.llm, tensors[name].items(), expect_kv_scales=False)
        said.append(vllm_logprobs(engine))
        found = gap(said[-1], expected[turn % 2])
        assert found.within(floor, FACTOR), (name, found, floor)
    assert said[0].equal(said[2]) and not said[0].equal(said[1])
    assert engine.pointers() == before


def test_norms_that_ranks_share_are_refitted_whole(
    moe_engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MiniMax splits the norms of queries and keys over tensor-parallel ranks."""
    monkeypatch.setattr(checks, "check_cpu_scoring", lambda spec: None)
    path = make_family_checkpoint(tmp_path, 0, "minimax_m2")
    engine, tensors = moe_engine(path, RECIPE), load_tensors(path)
    for layer, decoder in enumerate(engine.model.model.layers):
        name = f"model.layers.{layer}.self_attn.k_norm.weight"
        whole = tensors[name]
        kind = type(decoder.self_attn.k_norm)
        with set_current_vllm_config(engine.llm.llm_engine.vllm_config):
            part = kind(len(whole), weight_shard_world_size=2, weight_shard_rank=1)
        decoder.self_attn.k_norm = part
        assert part.weight.shape == (len(whole) // 2,)
    state_of(engine.model).inventory = None
    assert Inventory.of(engine.model).entries[name].shape == whole.shape
    refit(engine.llm, tensors.items(), expect_kv_scales=False)
    assert torch.equal(part.weight, whole[len(whole) // 2 :].float())


def test_layers_for_multi_token_prediction_are_left_out(
    moe_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """A trainer may send them: vLLM's checkpoint has them too, and its model does not."""
    path = make_family_checkpoint(tmp_path, 0, "glm4_moe", num_nextn_predict_layers=1)
    engine, tensors = moe_engine(path, RECIPE), load_tensors(path)
    last = "model.layers.1."
    more = {n.replace(last, "model.layers.2."): t.clone() for n, t in tensors.items() if last in n}
    more["model.layers.2.eh_proj.weight"] = torch.ones(256, 512)
    before = engine.greedy([[5, 6, 7]])
    report = refit(engine.llm, (tensors | more).items(), expect_kv_scales=False)
    assert report.left_out == len(more)
    assert engine.greedy([[5, 6, 7]]) == before
    beyond = {"model.layers.3.input_layernorm.weight": torch.ones(256)}
    with pytest.raises(RefitError, match=r"has no tensor 'model\.layers\.3\.input_layernorm"):
        refit(engine.llm, beyond.items(), expect_kv_scales=False)

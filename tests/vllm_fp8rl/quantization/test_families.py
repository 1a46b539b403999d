"""Families in live CPU engines, after refits: dense ones against fresh engines, others against
transformers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from fp8rl import Recipe
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.models.families import FAMILIES
from fp8rl.recipe import KVCache, Pins
from support.engine import PROMPTS, SCALES, Engine, load_tensors
from support.gaps import gap
from support.hf_reference import Attention, load_reference
from support.mla import LATENT, NATIVE_ROPE, ON_A_CPU
from support.teacher_forced import FACTOR, vllm_logprobs
from support.teacher_forced import PROMPTS as SHORT
from support.tiny import make_family_checkpoint
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.quantization import checks
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.derived import require_nothing_derived
from vllm_fp8rl.refit.receiver.inventory import Inventory

needs_experts = pytest.mark.usefixtures("experts_on_a_cpu")
PLAIN = Recipe(kv_cache=KVCache(dtype="auto"))
PUBLISHED = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(kinds=("a_proj", "b_proj")))
"""As in NeMo RL's configs of models with multi-latent attention."""


SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
DENSE: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("mistral", "qwen2", "qwen3", "gemma", "granite", "ministral")},
    **{kind: {} for kind in ("ministral3", "smollm3", "ernie4_5", "cohere2", "olmo2", "olmo3")},
    "exaone4": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "gemma2": WINDOWS,
    "gemma3_text": WINDOWS,
    "cohere": {"use_qk_norm": True},
}
QUICK_DENSE = ("llama", "gemma3_text", "cohere2")
"""Biases everywhere, sliding windows, attention beside the MLP."""


def quick(kinds: Iterable[str], few: tuple[str, ...]) -> list[Any]:
    """List the kinds, of which few are among the quick tests."""
    return [kind if kind in few else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


def make(path: Path, kind: str, seed: int) -> Path:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SHAPE | DENSE[kind]))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases too differ
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_every_dense_type_has_a_case():
    dense = {
        kind
        for family in FAMILIES
        if not family.experts and not family.wrapper and family.attention.kv == "heads"
        for kind in family.model_types
    }
    assert set(DENSE) == dense


@pytest.mark.parametrize("kind", quick(DENSE, QUICK_DENSE))
def test_tokens_after_a_refit_are_those_of_a_fresh_engine(kind, other_engine, tmp_path):
    old, new = (make(tmp_path / name, kind, seed) for seed, name in enumerate("ab"))
    recipe = Recipe(kv_cache=KVCache(dtype="fp8_e4m3"))
    engine, fresh = (
        other_engine(path, recipe, max_model_len=128, kv_cache_memory_bytes=4 << 20)
        for path in (old, new)
    )
    tensors = load_tensors(new)
    inventory = Inventory.of(engine.model)
    assert set(tensors) == {n for n, entry in inventory.entries.items() if entry.required}
    before, expected = vllm_logprobs(engine), vllm_logprobs(fresh)
    assert not before.equal(expected)
    refit(engine.llm, (tensors | SCALES).items(), expect_kv_scales=True)
    assert vllm_logprobs(engine).equal(expected)
    assert engine.greedy(PROMPTS) == fresh.greedy(PROMPTS)
    refit(engine.llm, (load_tensors(old) | SCALES).items(), expect_kv_scales=True)
    assert vllm_logprobs(engine).equal(before)


METHODS = {
    "linear": ("model.layers.1.mlp.down_proj", UnquantizedLinearMethod),
    "embedding": ("model.embed_tokens", UnquantizedEmbeddingMethod),
}


def keeping(kind: type) -> Any:
    """Derive a class as of vLLM's that keeps a copy of the weight."""
    step = {"process_weights_after_loading": lambda self, *_: None}
    return type(f"Keeping{kind.__name__}", (kind,), step)


@pytest.mark.parametrize("place", [*METHODS, "model", "layer", "backend"])
def test_what_keeps_a_copy_is_refused_by_name(engine, monkeypatch, place):
    require_nothing_derived(engine.model)
    if place in METHODS:
        path, method = METHODS[place]
        kind = keeping(method)
        kept = object.__new__(kind)
        monkeypatch.setattr(engine.model.get_submodule(path), "quant_method", kept)
    else:
        layer = engine.model.model.layers[0].self_attn.attn
        target = {"model": engine.model, "layer": layer, "backend": layer.impl}[place]
        kind = keeping(type(target))
        monkeypatch.setattr(target, "__class__", kind)
    for ask in (require_nothing_derived, Inventory):  # at the start, and at a first refit
        with pytest.raises(UnsupportedError, match=f"keeps what {kind.__name__} makes of its weig"):
            ask(engine.model)


def test_a_start_from_a_checkpoint_is_refused_before_it_loads(
    checkpoints, other_engine, monkeypatch
):
    """As Gemma-2's embedding would be without the patch of its method."""
    made = object.__new__(keeping(UnquantizedEmbeddingMethod))
    monkeypatch.setattr(
        "vllm_fp8rl.quantization.linear.RefitEmbeddingMethod", lambda state, name: made
    )
    with pytest.raises(UnsupportedError, match=r"'model\.embed_tokens' .* keeps what Keeping"):
        other_engine(checkpoints["a"], Recipe())


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"head_dim": 64},
    "mixtral": {},
    "glm4_moe": {},
    "minimax_m2": {},
    "glm4_moe_lite": LATENT | {"n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"]},
}
QUICK_EXPERTS = ("minimax_m2", "glm4_moe_lite")
"""A router of sigmoids with a bias; multi-latent attention with a low rank for queries."""


def with_grouped_router(engine: Engine) -> None:
    """Let vLLM's router for CPUs choose by sigmoids and a bias: as one group of all experts."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter  # from 0.30 on

    for module in engine.model.modules():
        if isinstance(router := getattr(module, "router", None), CPURouter):
            router.use_grouped_topk = True
            router.num_expert_group = router.topk_group = 1


@needs_experts
@pytest.mark.parametrize("kind", quick(EXPERTS, QUICK_EXPERTS))
def test_equals_transformers_through_refits(kind, moe_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "check_cpu_scoring", lambda spec: None)
    paths = {
        name: make_family_checkpoint(tmp_path / name, seed, kind, **EXPERTS[kind])
        for seed, name in enumerate("ab")
    }
    tensors = {name: load_tensors(path) for name, path in paths.items()}
    latent = kind == "glm4_moe_lite"
    recipe = PUBLISHED if latent else PLAIN
    arguments = ON_A_CPU if latent else {"compilation_config": NATIVE_ROPE}
    engine = moe_engine(paths["a"], recipe, **arguments)
    if kind == "minimax_m2":
        with_grouped_router(engine)
    before, said = engine.pointers(), []
    entries = Inventory.of(engine.model).entries
    assert set(tensors["a"]) == {n for n, entry in entries.items() if entry.required}
    expected, others = (
        [load_reference(path, recipe, attention=way).many(SHORT) for path in paths.values()]
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


@needs_experts
def test_norms_that_ranks_share_are_refitted_whole(moe_engine, tmp_path, monkeypatch):
    """MiniMax splits the norms of queries and keys over tensor-parallel ranks."""
    monkeypatch.setattr(checks, "check_cpu_scoring", lambda spec: None)
    path = make_family_checkpoint(tmp_path, 0, "minimax_m2")
    engine, tensors = moe_engine(path, PLAIN), load_tensors(path)
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


@needs_experts
def test_layers_for_multi_token_prediction_are_left_out(moe_engine, tmp_path):
    """A trainer may send them: vLLM's checkpoint has them too, and its model does not."""
    path = make_family_checkpoint(tmp_path, 0, "glm4_moe", num_nextn_predict_layers=1)
    engine, tensors = moe_engine(path, PLAIN), load_tensors(path)
    last = "model.layers.1."
    more = {n.replace(last, "model.layers.2."): t.clone() for n, t in tensors.items() if last in n}
    more["model.layers.2.eh_proj.weight"] = torch.ones(256, 512)
    report = refit(engine.llm, (tensors | more).items(), expect_kv_scales=False)
    assert report.left_out == len(more)
    beyond = {"model.layers.3.input_layernorm.weight": torch.ones(256)}
    with pytest.raises(RefitError, match=r"has no tensor 'model\.layers\.3\.input_layernorm"):
        refit(engine.llm, beyond.items(), expect_kv_scales=False)

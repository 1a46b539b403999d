"""Every dense type of the table in live CPU engines, against fresh ones after a refit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.models.families import FAMILIES
from fp8rl.recipe import KVCache
from support.engine import PROMPTS, SCALES, Engine, load_tensors
from support.teacher_forced import vllm_logprobs
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.derived import require_nothing_derived
from vllm_fp8rl.refit.receiver.inventory import Inventory

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
CASES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "granite": {},
    "ministral": {},
    "ministral3": {},
    "smollm3": {},
    "arcee": {"mlp_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "ernie4_5": {},
    "gemma2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
}

QUICK = ("llama", "qwen2", "gemma3_text", "cohere2")
"""Biases everywhere, of q, k and v alone, sliding windows, attention beside the MLP."""


def make(path: Path, kind: str, seed: int) -> Path:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(SHAPE | CASES[kind]))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases too differ
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def test_every_dense_type_has_a_case() -> None:
    dense = {
        kind
        for family in FAMILIES
        if not family.experts and not family.wrapper and family.attention.kv == "heads"
        for kind in family.model_types
    }
    assert set(CASES) == dense


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in CASES],
)
def test_tokens_after_a_refit_are_those_of_a_fresh_engine(
    kind: str, other_engine: Callable[..., Engine], tmp_path: Path
) -> None:
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


class PackedLinear(UnquantizedLinearMethod):
    """As a method of vLLM's that keeps a copy of the weight."""

    def __init__(self) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.clone()


class PackedEmbedding(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.clone()


@pytest.mark.parametrize(
    ("path", "method"),
    [("model.layers.1.mlp.down_proj", PackedLinear), ("model.embed_tokens", PackedEmbedding)],
)
def test_a_method_that_keeps_a_copy_is_refused_by_name(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str, method: type
) -> None:
    require_nothing_derived(engine.model)
    module = engine.model.get_submodule(path)
    monkeypatch.setattr(module, "quant_method", method())
    text = rf"'{path}' \({type(module).__name__}\) keeps what {method.__name__} makes of its weight"
    with pytest.raises(UnsupportedError, match=text):
        require_nothing_derived(engine.model)
    # A refit asks too, where the engine was started without a checkpoint.
    with pytest.raises(UnsupportedError, match=text):
        Inventory(engine.model)


@pytest.mark.parametrize("place", ["model", "layer", "backend"])
def test_steps_of_a_model_a_layer_and_a_backend_are_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    layer = engine.model.model.layers[0].self_attn.attn
    target = {"model": engine.model, "layer": layer, "backend": layer.impl}[place]

    def process_weights_after_loading(self: Any, *dtype: Any) -> None:
        self.copy = 1

    kind = type(
        f"Keeping{place}",
        (type(target),),
        {"process_weights_after_loading": process_weights_after_loading},
    )
    monkeypatch.setattr(target, "__class__", kind)
    with pytest.raises(UnsupportedError, match=f"keeps what Keeping{place} makes of its weight"):
        require_nothing_derived(engine.model)


def test_a_start_from_a_checkpoint_is_refused_before_it_loads(
    engine: Engine,
    checkpoints: dict[str, Path],
    other_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Gemma-2's embedding would be without the patch of its method."""
    monkeypatch.setattr(
        "vllm_fp8rl.quantization.linear.RefitEmbeddingMethod", lambda state, name: PackedEmbedding()
    )
    with pytest.raises(
        UnsupportedError, match=r"'model\.embed_tokens' .* keeps what PackedEmbedding"
    ):
        other_engine(checkpoints["a"], Recipe())

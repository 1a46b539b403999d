"""What ``exact`` refuses, and who puts its attention into service; its bits need a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.kv_scales import scale_names
from megatron_fp8rl import convert
from megatron_fp8rl.exact import ExactCore, exact_core
from megatron_fp8rl.kv_cache import KVCacheInTraining
from megatron_fp8rl.observers import core_attentions
from megatron_fp8rl.testing.models import build_gpt

EXACT = Recipe.from_dict({"exact": True})
SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SIZE), r"exact needs a Hopper GPU, .* not None"),
        (Qwen2Config(**SIZE), "exact needs add_qkv_bias False in the trainer, not True"),
        (Qwen3MoeConfig(**SIZE, **EXPERTS), "exact needs num_moe_experts None in the trainer, not"),
    ],
)
def test_what_would_not_be_exact_is_refused_before_anything_changes(mcore, config, message):
    model = build_gpt(config)
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=message):
        convert(model, EXACT)
    assert [type(module) for module in model.modules()] == before


def test_the_cache_puts_exact_attention_into_service_and_takes_it_out(mcore):
    """Before, and after, upstream's attention runs over K and V as they are."""
    model = build_gpt(LlamaConfig(**SIZE), dtype=torch.float32)
    tokens = torch.randint(0, 64, (1, 20))
    positions = torch.arange(20)[None]
    expected = model(tokens, positions, None)
    cores: list[Any] = [core for _, core in core_attentions([model])]
    for core in cores:
        core.__class__ = exact_core(type(core))  # as convert does on a GPU
    assert torch.equal(model(tokens, positions, None), expected)
    cache = KVCacheInTraining(model)
    assert not any(core.exact_cache.in_service for core in cores)
    assert torch.equal(model(tokens, positions, None), expected)
    with pytest.raises(UnsupportedError, match="already belongs to a KVCacheInTraining"):
        KVCacheInTraining(model)
    cache.set(dict.fromkeys(scale_names(2, ["k", "v"]), 2.0**-6))
    for number, core in enumerate(cores):
        assert core.exact_cache.in_service and not core._forward_pre_hooks
        assert core.exact_cache.scales.data_ptr() == cache._scales[number].data_ptr()
    cache.close()
    assert all(isinstance(core, ExactCore) and core.exact_cache is None for core in cores)
    assert torch.equal(model(tokens, positions, None), expected)

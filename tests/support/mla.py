"""Shapes of tiny models with multi-latent attention, for both engines."""

from __future__ import annotations

from typing import Any

from fp8rl import Recipe
from fp8rl.recipe import KVCache, Pins

SHAPES: dict[str, dict[str, Any]] = {
    "moonlight": {},
    # Megatron scores a group by its best topk // group_topk experts, transformers by its best two.
    "v3": {"q_lora_rank": 256, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    "v2": {"model_type": "deepseek_v2"},
}
"""Changes of ``make_mla_checkpoint``: Moonlight has no q_lora_rank, DeepSeek-V3 has groups of
experts, DeepSeek-V2 a softmax router without a bias."""
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
"""Keys of a config with experts, for the small models of ``make_family_checkpoint``."""
AUTO = KVCache(dtype="auto")
RECIPE = Recipe(kv_cache=AUTO)
"""kv_b_proj is in BF16 by default."""
PUBLISHED = Recipe(kv_cache=AUTO, pins=Pins(kinds=("a_proj", "b_proj")))
"""NVIDIA's recipe of Moonlight keeps these in BF16."""
ALL = Recipe(kv_cache=AUTO, pins=Pins(fp8=("*.kv_b_proj",)))
"""Also ``kv_b_proj``."""
NATIVE_ROPE: dict[str, Any] = {"custom_ops": ["-rotary_embedding"]}
ON_A_CPU: dict[str, Any] = {"compilation_config": NATIVE_ROPE, "attention_backend": "CPU_MLA"}
"""Arguments of an engine; without a backend vLLM takes AMX_MLA where the CPU has AMX."""

"""Every entry of the table against a tiny model that transformers builds without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from fp8rl import PinPolicy, families
from fp8rl.families import FAMILIES, FUSED, family_of, kind_of, module_names, modules_of
from fp8rl.recipe import Pins
from fp8rl.sizes import Sizes

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"moe_intermediate_size": 128, "num_experts": 3, "num_experts_per_tok": 2, "head_dim": 64}
LATENT = {
    "q_lora_rank": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "n_routed_experts": 3,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
HYBRID = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
SHARED = {**MOE, "shared_expert_intermediate_size": 192}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 256,
    "num_position_embeddings": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Llama, biased and tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 64}),
    "Qwen3-MoE": ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    "Qwen2-MoE": ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2}),
    "Mixtral": ("mixtral", {"num_local_experts": 3, "head_dim": 64}),
    "MiniMax-M2": ("minimax_m2", {"num_local_experts": 3, "head_dim": 64}),
    "GLM-4.5": (
        "glm4_moe",
        {**LATENT, "head_dim": 64, "first_k_dense_replace": 1, "kv_lora_rank": None},
    ),
    "GLM-4.5 with norms": (
        "glm4_moe",
        {**LATENT, "kv_lora_rank": None, "head_dim": 64, "use_qk_norm": True},
    ),
    "DeepSeek-V2": ("deepseek_v2", {**LATENT, "first_k_dense_replace": 1}),
    "DeepSeek-V3": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 2}),
    "Moonlight": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "GLM-4.7-Flash": (
        "glm4_moe_lite",
        {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    "Qwen3.5 text": ("qwen3_5_text", HYBRID),
    "Qwen3.5-MoE text": ("qwen3_5_moe_text", {**HYBRID, **SHARED}),
    "Qwen3.5": ("qwen3_5", HYBRID),
    "Qwen3.5-MoE": ("qwen3_5_moe", {**HYBRID, **SHARED}),
    "Qwen3-VL": ("qwen3_vl", {"head_dim": 64}),
}


def built(case: str) -> tuple[Any, dict[str, torch.Tensor], int]:
    """The config, the tensors of a checkpoint by name, and the number of parameters."""
    kind, changes = CASES[case]
    wrapped = hasattr(AutoConfig.for_model(kind), "vision_config")
    if wrapped:
        values: dict[str, Any] = {"text_config": SHAPE | changes, "vision_config": VISION}
    else:
        values = SHAPE | changes
    config = AutoConfig.for_model(kind, **values)
    auto = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    tensors = revert_weight_conversion(model, model.state_dict())
    # A bias that chooses experts is a buffer in transformers, and a tensor of the checkpoint.
    shared = {id(p): p.numel() for p in model.parameters()}
    buffers = {n: t for n, t in model.state_dict().items() if n.endswith("correction_bias")}
    return config, tensors, sum(shared.values()) + sum(t.numel() for t in buffers.values())


@pytest.mark.parametrize("case", CASES)
def test_names_kinds_and_sizes_are_those_of_transformers(case: str) -> None:
    config, tensors, count = built(case)
    family = family_of(config)
    assert family is not None

    modules = {module.name: module for module in modules_of(config)}
    assert [*modules] == module_names(config) == module_names(config.to_dict())
    inside = {n for n in tensors if not any(n.startswith(f"{t}.") for t in family.towers)}
    weights = {n.removesuffix(".weight") for n in inside if n.endswith(".weight")}
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if tied:
        weights.add("lm_head")
    assert set(modules) - set(family.towers) == weights
    assert bool(set(modules) & set(family.towers)) == (len(inside) < len(tensors))

    text = families.language_config(config)
    biases = {
        n for n, m in modules.items() if m.bias and (m.bias == "always" or getattr(text, m.bias))
    }
    assert {f"{name}.bias" for name in biases} == {n for n in inside if n.endswith(".bias")}
    prefix = family.wrapper if text is not config else "model."
    beside = {
        f"{prefix}layers.{layer}.{parameter.name}": parameter
        for layer in range(text.num_hidden_layers)
        for parameter in families.layer_parameters(family, text, layer)
    }
    assert set(beside) == {n for n in inside if not n.endswith((".weight", ".bias"))}

    sizes = Sizes(config, 1)
    for name, module in modules.items():
        assert module.kind == kind_of(name)
        if module.kind != "tower" and (name != "lm_head" or not tied):
            assert sizes._shape(module) == tuple(tensors[f"{name}.weight"].shape), name
    rows = PinPolicy(Pins(), modules).report()
    assert sizes.elements(rows) == count
    codes = sizes.bytes(rows, 2, 2).codes
    assert codes == sum(
        tensors[f"{row.name}.weight"].numel() for row in rows if row.precision == "fp8"
    )
    for row in rows:
        if row.precision == "fp8":
            assert tensors[f"{row.name}.weight"].ndim == 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_entry_has_a_case_and_agrees_with_the_others(family: families.Family) -> None:
    kinds = {AutoConfig.for_model(kind).get_text_config().model_type for kind, _ in CASES.values()}
    assert kinds & set(family.model_types)
    assert set(family.missing) <= {"rollout", "training"}
    for block in filter(None, (family.attention, family.linear_attention)):
        names = {module.name for module in block.modules}
        assert set(block.derived) <= names
        for module in block.modules:
            assert kind_of(f"model.layers.0.{module.name}") == module.kind
            assert families.default_reason(module.name) == module.bf16


def test_a_model_type_is_in_one_entry() -> None:
    types = [kind for family in FAMILIES for kind in family.model_types]
    assert len(set(types)) == len(types)
    parts = [part for names in FUSED.values() for part in names]
    assert len(set(parts)) == len(parts)

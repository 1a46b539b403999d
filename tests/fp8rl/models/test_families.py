"""Every entry of the table against a tiny model that transformers builds without memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion

from fp8rl import PinPolicy
from fp8rl.errors import PinError
from fp8rl.models import families
from fp8rl.models.families import FAMILIES, kind_of
from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins
from support.configs import QWEN3_5, moonlight

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
BIASED = {"attention_bias": True, "mlp_bias": True}
GLM = {**LATENT, "kv_lora_rank": None, "head_dim": 64}
HYBRID = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
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
    "Llama, biased and tied": ("llama", BIASED | {"tie_word_embeddings": True}),
    "Gemma": ("gemma", {"head_dim": 64}),
    "Granite": ("granite", {"mlp_bias": True}),
    "Ministral": ("ministral", {"head_dim": 64}),
    "Ministral 3": ("ministral3", {"head_dim": 64}),
    "SmolLM3": ("smollm3", {"pad_token_id": 0}),
    "Arcee": ("arcee", {"mlp_bias": True}),
    "Seed-OSS": ("seed_oss", {"head_dim": 64, "attention_out_bias": False}),
    "ERNIE-4.5": ("ernie4_5", {"head_dim": 64, "use_bias": True}),
    "Gemma-2": ("gemma2", {"head_dim": 64}),
    "Gemma-3": ("gemma3_text", {"head_dim": 64, "attention_bias": True}),
    "Command R": ("cohere", {"use_qk_norm": True}),
    "Command R7B": ("cohere2", {}),
    "OLMo-2": ("olmo2", {}),
    "OLMo-3": ("olmo3", {}),
    "EXAONE-4.0": ("exaone4", {"head_dim": 64}),
    "Qwen2": ("qwen2", {}),
    "Qwen3": ("qwen3", {"head_dim": 64}),
    "Qwen3-MoE": ("qwen3_moe", {**MOE, "mlp_only_layers": [1]}),
    "Qwen2-MoE": ("qwen2_moe", {**SHARED, "decoder_sparse_step": 2}),
    "Mixtral": ("mixtral", {"num_local_experts": 3, "head_dim": 64}),
    "MiniMax-M2": ("minimax_m2", {"num_local_experts": 3, "head_dim": 64}),
    "GLM-4.5": ("glm4_moe", {**GLM, "first_k_dense_replace": 1}),
    "GLM-4.5 with norms": ("glm4_moe", {**GLM, "use_qk_norm": True}),
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
    spec = ModelSpec.of(config)
    family = spec.family

    modules = {module.name: module for module in spec.modules}
    assert tuple(modules) == spec.names == ModelSpec.of(config.to_dict()).names
    inside = {n for n in tensors if not any(n.startswith(f"{t}.") for t in family.towers)}
    weights = {n.removesuffix(".weight") for n in inside if n.endswith(".weight")}
    assert spec.tied == bool(getattr(config, "tie_word_embeddings", False))
    if spec.tied:
        weights.add("lm_head")
    assert set(modules) - set(family.towers) == weights
    assert bool(set(modules) & set(family.towers)) == (len(inside) < len(tensors))

    biases = {f"{module.name}.bias" for module in spec.modules if module.bias}
    assert biases == {n for n in inside if n.endswith(".bias")}
    beside = {
        f"{spec.stem}layers.{number}.{parameter.name}"
        for number, layer in enumerate(spec.layers)
        for parameter in layer.parameters
    }
    assert beside == {n for n in inside if not n.endswith((".weight", ".bias"))}

    sizes = Sizes(spec, 1)
    for name, module in modules.items():
        assert module.kind == kind_of(name)
        if module.kind != "tower" and (name != "lm_head" or not spec.tied):
            assert sizes._shape(module) == tuple(tensors[f"{name}.weight"].shape), name
    rows = PinPolicy(Pins(), modules).report()
    assert sizes.elements(rows) == count
    codes = sizes.bytes(rows, 2, "auto").codes
    assert codes == sum(
        tensors[f"{row.name}.weight"].numel() for row in rows if row.precision == "fp8"
    )
    for row in rows:
        if row.precision == "fp8":
            assert tensors[f"{row.name}.weight"].ndim == 2


def test_every_type_of_the_table_was_compared_and_names_have_one_kind() -> None:
    """Kimi-K2 has a class of its own repository, with DeepSeek-V3's modules."""
    compared = {
        AutoConfig.for_model(kind).get_text_config().model_type for kind, _ in CASES.values()
    }
    types = {kind for family in FAMILIES for kind in family.model_types}
    assert types - compared == {"mistral", "kimi_k2"}
    two = [ModelSpec.of({"model_type": k, "num_hidden_layers": 2}) for k in ("mistral", "llama")]
    assert two[0].names == two[1].names
    for family in FAMILIES:
        assert set(family.missing) <= {"rollout", "training"}
        for block in filter(None, (family.attention, family.linear_attention)):
            for module in block.modules:
                assert kind_of(f"model.layers.0.{module.name}") == module.kind
                assert families.default_reason(module.name) == module.bf16


def test_what_is_in_bf16_by_default_and_how_a_recipe_changes_it() -> None:
    names = ModelSpec.of(moonlight(q_lora_rank=128)).names
    name = "model.layers.1.self_attn.kv_b_proj"
    policy = PinPolicy(Pins(), names)
    assert policy.row(name).reason.startswith("default: decode multiplies it with activations")
    assert policy.precision("model.layers.1.self_attn.fused_qkv_a_proj") == "fp8"
    assert PinPolicy(Pins(fp8=("*.kv_b_proj",)), names).precision(name) == "fp8"
    assert PinPolicy(Pins(fp8=("*.kv_b_proj",), last=1), names).row(name).reason == "last: 1"
    by_name, by_kind = Pins(names=("*a_proj*", "*b_proj*")), Pins(kinds=("a_proj", "b_proj"))
    linears = [PinPolicy(pins, names).bf16_linears() for pins in (by_name, by_kind)]
    assert linears[0] == linears[1]
    for pins, match in (
        (Pins(fp8=("*.o_proj",)), r"pins.fp8: \*.o_proj matches no module .* are kv_b_proj in"),
        (Pins(names=("*.q_a_proj",)), r"not all parts of the fused '.*fused_qkv_a_proj'; pin all"),
    ):
        with pytest.raises(PinError, match=match):
            PinPolicy(pins, names)


def test_a_hybrid_under_a_wrapper() -> None:
    policy = PinPolicy(Pins(first=1, names=("*visual*",)), ModelSpec.of(QWEN3_5).names)
    assert policy.row("model.visual.blocks.3.attn.qkv").reason == "always: tower"
    prefix = "model.language_model.layers.1.linear_attn"
    assert policy.precision(f"{prefix}.in_proj_qkvz") == "fp8"
    assert policy.precision(f"{prefix}.in_proj_ba") == "bf16"


def test_latents_are_cached_once_and_linear_attention_not_at_all() -> None:
    for case, expected in (
        ("Moonlight", 256 + 16),
        ("Qwen3.5 text", 2 * 2 * 64),
        ("Llama", 4 * 256),
    ):
        spec = ModelSpec.of(built(case)[0])
        rows = PinPolicy(Pins(), spec.names).report()
        layers = 4 if case == "Moonlight" else 1
        assert Sizes(spec, 1).bytes(rows, 2, "fp8_e4m3").kv_per_token == layers * expected, case
        assert Sizes(spec, 1).kv_per_token(2, "auto") == 2 * layers * expected, case

"""Families with experts and with latents in Megatron-Core, against transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.models.families import FAMILIES
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVCache
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.hf_names import module_names as trainer_names
from megatron_fp8rl.testing.models import build_gpt
from support import mla
from support.gaps import gap, noise_floor
from support.hf_reference import load_reference
from support.megatron import convert_alone, hf_gpt, logprobs, prompts
from support.tiny import make_family_checkpoint, make_mla_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
UNQUANTIZED = Recipe(rollout=False, training=False, kv_cache=RECIPE.kv_cache)
FACTOR = 4.0
FAMILIES_WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen2_moe": {"head_dim": 64},
    "glm4_moe": {"use_qk_norm": True},
}
CASES = {*FAMILIES_WITH_EXPERTS, *mla.SHAPES}
RECIPES = {"moonlight": [mla.RECIPE], "v2": [mla.PUBLISHED], "v3": [mla.ALL, mla.RECIPE]}


@pytest.fixture(scope="module", params=sorted(CASES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    folder = tmp_path_factory.mktemp("families") / name
    if name in mla.SHAPES:
        return make_mla_checkpoint(folder, 3, **mla.SHAPES[name])
    return make_family_checkpoint(folder, 3, name, **FAMILIES_WITH_EXPERTS[name])


def test_logprobs_equal_transformers(mcore: Any, path: Path) -> None:
    """Also with the fake quantization of a recipe, and then not without it."""
    model = hf_gpt(path)
    expected = load_reference(path, UNQUANTIZED).many(prompts())
    assert gap(logprobs(model, prompts()), expected).max < 2e-5
    for recipe in RECIPES.get(path.name, [RECIPE]):
        conversion = convert_alone(model, recipe)
        found = logprobs(model, prompts())
        floor = noise_floor(path, recipe, prompts())
        near = gap(found, load_reference(path, recipe).many(prompts()))
        assert near.within(floor, FACTOR), (near, floor)
        assert not gap(found, expected).within(floor, FACTOR)
        conversion.close()


def test_names_are_the_rollouts_and_tensors_come_back(mcore: Any, path: Path) -> None:
    """Under a wrapper that casts the router's bias to BF16 too: Megatron keeps it in float32."""
    expected = load_file(path / "model.safetensors")
    spec = ModelSpec.of(AutoConfig.from_pretrained(path))
    wide = {
        f"model.layers.{number}.{parameter.name}"
        for number, layer in enumerate(spec.layers)
        for parameter in layer.parameters
        if parameter.float32
    }
    assert wide == {key for key in expected if key.endswith("e_score_correction_bias")}
    model = hf_gpt(path, torch.bfloat16)
    assert sorted(trainer_names(model.config)) == sorted(spec.names)
    for chunk in (model, Float16Module(model.config, model)):
        load_hf(chunk, expected)
        found = dict(export_hf(chunk))
        assert sorted(found) == sorted(expected)
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
            assert tensor.dtype == (torch.float32 if name in wide else torch.bfloat16), name


OFTEN: dict[str, Any] = {
    "hidden_act": "gelu",
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "attn_logit_softcapping": 5.0,
    "attention_bias": True,
    "rope_theta": 100.0,
    "rope_interleave": False,
    "head_dim": 32,
    "moe_layer_freq": 2,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "dense"],
    "routed_scaling_factor": 3.0,
    "scoring_func": "softmax",
    "n_group": 2,
    # In the published config of SmolLM2 and of its copies.
    "is_llama_config": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    "unsloth_fixed": True,
}
"""Keys that some family has, for models of others, and that tools leave behind."""
ASIDE = ("model_type", "transformers_version", "dtype", "return_dict", "id2label")
"""The family itself, and keys that are not the model's."""
SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": None},
    "deepseek_v3": {
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


def _other(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, str):
        return f"{value}2"
    if isinstance(value, list):
        return value[::-1] or [0]
    return 8 if value is None else value


@pytest.mark.parametrize("kind", ["mistral", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_every_key_of_a_config_counts_or_is_refused_by_its_name(
    mcore: Any, kind: str, tmp_path: Path
) -> None:
    """Against transformers; naively a sliding window was dropped."""
    base = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,  # so that a change shows
        tie_word_embeddings=False,
        **SIZES[kind],
    )
    values = base.to_dict()
    cases = {key: _other(value) for key, value in values.items() if key not in ASIDE}
    if kind == "deepseek_v3":
        del cases["rms_norm_eps"]  # of the latents' norms transformers ignores it, vLLM does not
    cases |= {key: value for key, value in OFTEN.items() if values.get(key) != value}
    ids = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def by_transformers(config: Any, *, loaded: bool) -> torch.Tensor:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        if loaded:
            model = type(model).from_pretrained(tmp_path, config=config)
        return torch.log_softmax(model.eval()(ids).logits.float(), -1)

    refused, served = set(), set()
    for key, value in cases.items():
        # rope_parameters of transformers hold the values of older keys, which these replace.
        replaced = ["rope_parameters"] if key in ("partial_rotary_factor", "rope_theta") else []
        rest = {name: each for name, each in values.items() if name not in replaced}
        try:
            config = type(base)(**{**rest, key: value})
        except Exception:
            continue  # no config of transformers
        try:
            model = build_gpt(config, dtype=torch.float32).eval()
            save_file(dict(export_hf(model)), tmp_path / "model.safetensors", {"format": "pt"})
            found = torch.log_softmax(model(ids, torch.arange(40).expand(2, -1), None).float(), -1)
        except UnsupportedError as error:
            assert key in str(error)
            refused.add(key)
        except Exception:  # no model of transformers either
            with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError)):
                by_transformers(config, loaded=False)
        else:
            config.save_pretrained(tmp_path)
            try:
                expected = by_transformers(config, loaded=True)
            except Exception:
                with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError)):
                    by_transformers(config, loaded=False)
            else:
                assert (found - expected).abs().max() < 1e-3, (key, value)
                served.add(key)
    assert {"partial_rotary_factor", "hidden_act", "layer_types", "attention_dropout"} <= refused
    assert {"hidden_size", "rope_theta", "use_cache", "num_hidden_layers"} <= served
    assert {"is_llama_config", "transformers.js_config", "unsloth_fixed"} <= served


@pytest.mark.parametrize("kind", ["minimax_m2", "gemma3_text"])
def test_families_without_a_builder(mcore: Any, kind: str) -> None:
    assert any(kind in family.model_types for family in FAMILIES)
    with pytest.raises(UnsupportedError, match="has no builder"):
        build_gpt(AutoConfig.for_model(kind))

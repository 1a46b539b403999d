"""Families with experts and with latents in Megatron-Core, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.module import Float16Module
from safetensors.torch import load_file
from transformers import AutoConfig

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.models.families import FAMILIES
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVCache
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.hf_names import module_names as trainer_names
from megatron_fp8rl.kv.observers import QKVObserver
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


def test_a_bias_that_training_has_moved_is_exported(mcore: Any, tmp_path: Path) -> None:
    path, name = make_mla_checkpoint(tmp_path / "moonlight", 3), "layers.1.mlp.gate.e_score_correct"
    model: Any = hf_gpt(path, torch.bfloat16)
    model.decoder.layers[1].mlp.router.expert_bias += 0.25
    before = load_file(path / "model.safetensors")
    (moved,) = (tensor - before[key] for key, tensor in export_hf(model) if name in key)
    assert torch.allclose(moved, torch.full_like(moved, 0.25), atol=1e-6)


def test_what_latents_refuse(mcore: Any, tmp_path: Path) -> None:
    model: Any = hf_gpt(make_mla_checkpoint(tmp_path / "moonlight", 3))
    with pytest.raises(UnsupportedError, match="cache holds latents and not k and v"):
        QKVObserver(model)
    query = model.decoder.layers[1].self_attention.linear_q_proj
    query.layer_norm_weight = torch.nn.Parameter(torch.ones(256))
    with pytest.raises(UnsupportedError, match=r"1.self_attention.linear_q_proj' begins with a no"):
        convert(model, mla.RECIPE)
    del query.layer_norm_weight
    down = model.decoder.layers[1].self_attention.linear_kv_down_proj
    down.output_size *= 2  # as over two ranks
    with pytest.raises(UnsupportedError, match=r"rows of 'kv_a_proj_with_mqa' on this rank, no"):
        convert(model, mla.RECIPE)
    convert_alone(model, mla.PUBLISHED).close()  # whose pins have the kind


@pytest.mark.parametrize("kind", ["minimax_m2", "gemma3_text"])
def test_families_without_a_builder(mcore: Any, kind: str) -> None:
    assert any(kind in family.model_types for family in FAMILIES)
    with pytest.raises(UnsupportedError, match="has no builder"):
        build_gpt(AutoConfig.for_model(kind))

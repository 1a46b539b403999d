"""Families with experts in Megatron-Core, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.families import FAMILIES, module_names
from fp8rl.recipe import KVCache
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.sites import module_names as trainer_names
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import convert_alone, hf_gpt, logprobs, prompts
from vllm_fp8rl.testing.hf_reference import gap, load_reference, noise_floor
from vllm_fp8rl.testing.tiny import make_family_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
UNQUANTIZED = Recipe(rollout=False, training=False, kv_cache=RECIPE.kv_cache)
FACTOR = 4.0
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen2_moe": {"head_dim": 64},
    "glm4_moe": {"use_qk_norm": True},
}


@pytest.fixture(scope="module", params=CASES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return make_family_checkpoint(folder, 3, request.param, **changes)


def test_logprobs_equal_transformers(mcore: Any, path: Path) -> None:
    model = hf_gpt(path)
    expected = load_reference(path, UNQUANTIZED).many(prompts())
    assert gap(logprobs(model, prompts()), expected).max < 2e-5
    convert_alone(model, RECIPE)
    found = gap(logprobs(model, prompts()), load_reference(path, RECIPE).many(prompts()))
    floor = noise_floor(path, RECIPE, prompts())
    assert found.within(floor, FACTOR), (found, floor)
    assert not gap(logprobs(model, prompts()), expected).within(floor, FACTOR)


def test_names_are_the_rollouts_and_tensors_come_back(mcore: Any, path: Path) -> None:
    model = hf_gpt(path, torch.bfloat16)
    assert sorted(trainer_names(model.config)) == sorted(
        module_names(AutoConfig.from_pretrained(path))
    )
    expected = load_file(path / "model.safetensors")
    found = dict(export_hf(model))
    assert sorted(found) == sorted(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype, name


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2", "gemma3_text", "granite", "arcee"])
def test_families_without_a_builder(mcore: Any, kind: str) -> None:
    message = "has no builder"
    assert any(kind in family.model_types for family in FAMILIES)
    with pytest.raises(UnsupportedError, match=message):
        build_gpt(AutoConfig.for_model(kind))

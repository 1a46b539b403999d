"""Qwen3.5 in Megatron-Core: gated delta nets and gated attention, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from fp8rl import Recipe
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.families import module_names as hf_module_names
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache, Pins
from megatron_fp8rl import convert, weight_codes_hf
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.kv_cache import KVCacheInTraining
from megatron_fp8rl.observers import QKVObserver
from megatron_fp8rl.sites import module_names
from megatron_fp8rl.testing.models import build_gpt
from support.gated_delta_net import token_by_token
from support.megatron import convert_alone
from vllm_fp8rl.testing.hf_reference import gap, load_reference
from vllm_fp8rl.testing.tiny import make_qwen35_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
UNQUANTIZED = Recipe(rollout=False, training=False, kv_cache=RECIPE.kv_cache)
FACTOR = 2.0
ATTENTION = 3
"""The only layer of four with keys and values."""
SHAPES: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"experts": True}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("qwen35")
    return {name: make_qwen35_checkpoint(root / name, 3, **shape) for name, shape in SHAPES.items()}


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def gpt(path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    model = build_gpt(AutoConfig.from_pretrained(path), dtype=dtype, **overrides).eval()
    load_hf(model, load_tensors(path), allow_cast=dtype != torch.float32)
    return model


def prompts() -> list[list[int]]:
    return torch.randint(2, 512, (24, 16), generator=torch.Generator().manual_seed(5)).tolist()


def logprobs(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.tensor(prompts())
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    with torch.no_grad():
        found = torch.log_softmax(model(tokens, positions, None)[:, :-1].float(), dim=-1)
    return found.gather(2, tokens[:, 1:, None]).flatten()


@pytest.mark.parametrize("name", SHAPES)
def test_logprobs_equal_transformers(mcore, paths, name):
    expected = load_reference(paths[name], UNQUANTIZED).many(prompts())
    assert gap(logprobs(gpt(paths[name])), expected).max < 3e-5


@pytest.mark.parametrize("name", SHAPES)
def test_fp8_logprobs_equal_transformers_with_the_same_fake_quantization(mcore, paths, name):
    model = gpt(paths[name])
    convert_alone(model, RECIPE)
    expected = load_reference(paths[name], RECIPE).many(prompts())
    with token_by_token():
        other = load_reference(paths[name], RECIPE, attention="sdpa").many(prompts())
    floor = gap(other, expected)
    found = gap(logprobs(model), expected)
    assert found.within(floor, FACTOR), (found, floor)
    assert gap(logprobs(gpt(paths[name])), expected).mean > 2 * found.mean


@pytest.mark.parametrize("name", SHAPES)
def test_the_export_returns_what_was_loaded(mcore, paths, name):
    tensors = load_tensors(paths[name])
    exported = dict(export_hf(gpt(paths[name])))
    assert exported.keys() == tensors.keys()
    for key, tensor in tensors.items():
        # Megatron keeps this norm less one.
        near = 1e-6 if key.endswith("linear_attn.norm.weight") else 0.0
        assert torch.allclose(exported[key], tensor.float(), rtol=0, atol=near), key


@pytest.mark.parametrize("name", SHAPES)
def test_codes_are_the_rollouts(mcore, paths, name):
    model = gpt(paths[name], torch.bfloat16)
    conversion = convert_alone(model, RECIPE)
    tensors = load_tensors(paths[name])
    module = conversion.modules["model.layers.0.linear_attn.in_proj_qkvz"]
    codes = weight_codes_hf(module)
    fused = [tensors[f"model.layers.0.linear_attn.in_proj_{part}.weight"] for part in ("qkv", "z")]
    expected = quantize_block(torch.cat(fused))
    found = [codes[f"model.layers.0.linear_attn.in_proj_{part}"] for part in ("qkv", "z")]
    assert torch.equal(
        torch.cat([each.codes.view(torch.uint8) for each in found]),
        expected.codes.view(torch.uint8),
    )
    assert torch.equal(torch.cat([each.scale_inv for each in found]), expected.scale_inv)
    wire = dict(fp8_wire(export_hf(model), conversion.policy, "fp32"))
    for layer in (0, ATTENTION):
        for part in ("linear_attn.in_proj_qkv", "self_attn.q_proj", "linear_attn.out_proj"):
            key = f"model.layers.{layer}.{part}.weight"
            if key in tensors:
                expected = quantize_block(tensors[key])
                assert torch.equal(wire[key].view(torch.uint8), expected.codes.view(torch.uint8))
                assert torch.equal(wire[f"{key}_scale_inv"], expected.scale_inv)
    assert wire["model.layers.0.linear_attn.in_proj_b.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("name", SHAPES)
def test_the_pins_of_both_engines_are_resolved_alike(mcore, paths, name):
    model, config = gpt(paths[name]), AutoConfig.from_pretrained(paths[name])
    ours, theirs = (
        {row.name: (row.precision, row.reason) for row in convert_policy(model, names).report()}
        for names in (None, hf_module_names(config))
    )
    assert ours == theirs
    assert ours["model.layers.1.linear_attn.in_proj_a"][0] == "bf16"
    inside = module_names(model.config, wrapped=True)
    assert inside[0] == "model.visual"
    stem = "model.language_model."
    assert f"{stem}layers.0.linear_attn.in_proj_qkv" in inside
    assert len(inside) == 1 + len(hf_module_names(config))


def convert_policy(model: Any, names: list[str] | None) -> Any:
    from fp8rl import PinPolicy

    return PinPolicy(RECIPE.pins, module_names(model.config) if names is None else names)


def test_every_gradient_is_as_without_a_split(mcore, paths):
    """The rows in BF16 have the gradient of an unconverted linear, the others that of FP8."""
    tokens = torch.tensor(prompts())[:4]
    positions = torch.arange(tokens.shape[1]).expand(len(tokens), -1)
    gradients = {}
    for recipe in (RECIPE, None):
        model = gpt(paths["dense"])
        if recipe is not None:
            convert_alone(model, recipe)
        model(tokens, positions, None).float().log_softmax(-1)[..., 7].sum().backward()
        gradients[recipe is None] = {
            name: parameter.grad for name, parameter in model.named_parameters()
        }
    exact, found = gradients[True], gradients[False]
    for name, gradient in found.items():
        assert gradient is not None and torch.isfinite(gradient).all(), name
        near = torch.nn.functional.cosine_similarity(gradient.flatten(), exact[name].flatten(), 0)
        assert near > 0.7, (name, near)
    in_proj = found["decoder.layers.0.self_attention.in_proj.weight"]
    assert (in_proj[-8:].abs().sum(1) > 0).all() and (in_proj[:-8].abs().sum(1) > 0).all()


def test_only_layers_with_keys_have_scales(mcore, paths):
    model = gpt(paths["dense"])
    observer = QKVObserver(model)
    logprobs(model)
    scales = observer.scales(1.0)
    assert set(scales) == {scale_name(ATTENTION, role) for role in ("q", "k", "v")}
    cache = KVCacheInTraining(model)
    before = logprobs(model)
    cache.set(scales)
    assert not torch.equal(logprobs(model), before)
    cache.close()
    observer.close()


def test_refusals(mcore, paths):
    model = gpt(paths["dense"])
    ba = Recipe(pins=Pins(fp8=("*.in_proj_a", "*.in_proj_b")), kv_cache=RECIPE.kv_cache)
    with pytest.raises(PinError, match="pins.fp8 puts .*in_proj_ba' in FP8"):
        convert(model, ba)
    model.config.experimental_attention_variant = "gdn2"
    with pytest.raises(UnsupportedError, match="gdn2"):
        convert(model, RECIPE)
    with pytest.raises(UnsupportedError, match="gdn2"):
        dict(export_hf(model))

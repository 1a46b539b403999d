"""Engines of other kinds: checkpoints in FP8, no checkpoint, pins, tied embeddings, odd widths."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8rl import Recipe
from fp8rl.errors import (
    CheckpointError,
    PinError,
    RecipeError,
    RefitError,
    ScaleError,
    UnsupportedError,
)
from fp8rl.numerics import Quantized, quantize_block, whole_groups
from fp8rl.recipe import KVCache
from support.engine import (
    FUSED,
    LAYERS,
    PROMPTS,
    SCALES,
    in_fp8,
    load_tensors,
    make_checkpoint,
    same_bits,
)
from support.lora import LORA
from support.mla import ON_A_CPU
from support.tiny import make_family_checkpoint, make_mla_checkpoint, make_qwen35_checkpoint
from vllm_fp8rl.compat import require_cpu_router
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kernels.linear import choice
from vllm_fp8rl.kernels.linear.choice import CPU_CACHE_ENV, CpuKernel
from vllm_fp8rl.quantization.config import Fp8RLConfig, read_recipe
from vllm_fp8rl.quantization.linear import Fp8RLLinearMethod, RefitLinearMethod
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory

UP = "model.layers.1.mlp.up_proj.weight"
BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""Of checkpoints as DeepSeek-V3's."""


class PaddedKernel(CpuKernel):
    """Store and multiply whole groups, as a GPU does."""

    stored_columns = staticmethod(whole_groups)

    def apply(self, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
        missing = weight.codes.shape[1] - x.shape[-1]
        return super().apply(torch.nn.functional.pad(x, (0, missing)), weight)


def copied(source: Path, target: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    """Write a checkpoint once more, with other tensors and keys of its config."""
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    known = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (target / "config.json").write_text(json.dumps(known | config), encoding="utf-8")
    return target


def test_block_fp8_checkpoint_keeps_its_codes_and_kv_scales(
    engine, other_engine, checkpoints, a, tmp_path
):
    tensors = in_fp8(a) | SCALES
    path = copied(checkpoints["a"], tmp_path, tensors, quantization_config=BLOCK_FP8)
    loaded = other_engine(path, Recipe(), scaled=False)
    assert loaded.kv_scales() == {name: scale.item() for name, scale in SCALES.items()}
    assert len(loaded.greedy(PROMPTS)) == len(PROMPTS)
    for (name, ours), (_, theirs) in zip(
        loaded.model.named_parameters(), engine.model.named_parameters(), strict=True
    ):
        assert same_bits(ours, theirs) or name.endswith("q_scale"), name
    for asked in (None, "fp8"):  # without our name the checkpoint is vLLM's own
        assert Fp8RLConfig.override_quantization_method(BLOCK_FP8, asked) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": None}, "per-tensor FP8"),
        ({"quant_method": "gptq"}, "quantized with 'gptq'"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "quantized with 'mxfp8'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_checkpoints_are_refused(other_engine, checkpoints, a, tmp_path, changes, message):
    path = copied(checkpoints["a"], tmp_path, a, quantization_config=BLOCK_FP8 | changes)
    with pytest.raises(UnsupportedError, match=message):
        other_engine(path, Recipe())


def test_pinned_layers_stay_in_the_models_dtype_and_refit(engine, shared_engine, a, b):
    """That they are right and follow a refit: test_teacher_forced.py."""
    pinned = shared_engine("pins")
    kinds = {n: type(m.quant_method) for n, m in pinned.model.named_modules() if n[-4:] == "proj"}
    last = {name for name in kinds if f"layers.{LAYERS - 1}." in name or "down_proj" in name}
    assert {kinds[name] for name in last} == {RefitLinearMethod}
    assert {kinds[name] for name in kinds.keys() - last} == {Fp8RLLinearMethod}
    before = pinned.pointers()
    refit(pinned.llm, b.items(), expect_kv_scales=False)
    live = pinned.model.get_submodule("model.layers.1.mlp.gate_up_proj").weight
    gate = UP.replace("up_", "gate_")
    assert torch.equal(live, torch.cat([b[gate], b[UP]]).float())
    assert pinned.pointers() == before
    codes = quantize_block(a[UP]).codes
    with pytest.raises(RefitError, match=r"float8_e4m3fn; send bfloat16"):
        refit(pinned.llm, [(UP, codes)], expect_kv_scales=False)
    with pytest.raises(UnsupportedError, match="kept in BF16 but arrives as"):
        pinned.model.load_weights([(UP, codes)])


def test_tied_embeddings(other_engine, tmp_path):
    paths = [make_checkpoint(tmp_path / str(i), 20 + i, tie_word_embeddings=True) for i in (0, 1)]
    first, second = (load_tensors(path) for path in paths)
    tied = other_engine(paths[0], Recipe())
    with_first = tied.greedy(PROMPTS)
    # A trainer may send the second name too, before or after, in the same batch or another.
    head = {"lm_head.weight": first["model.embed_tokens.weight"]}
    other = {"lm_head.weight": second["model.embed_tokens.weight"]}
    for _ in range(2):
        for stream, batch_bytes in ((first, 1), (head | first, 1), (first | head, 1 << 30)):
            refit(tied.llm, second.items(), expect_kv_scales=False)
            refit(tied.llm, stream.items(), expect_kv_scales=False, batch_bytes=batch_bytes)
            assert tied.greedy(PROMPTS) == with_first
        for stream, batch_bytes in ((other | first, 1 << 30), (first | other, 1)):
            with pytest.raises(RefitError, match="tied"):
                refit(tied.llm, stream.items(), expect_kv_scales=False, batch_bytes=batch_bytes)
        # Once more with the projection that is the embedding itself, as up to vLLM 0.27.1.
        tied.model.lm_head = tied.model.model.embed_tokens
        state_of(tied.model).inventory = None
    assert Inventory.of(tied.model).entries["lm_head.weight"].route is None


@pytest.mark.parametrize(("scale_format", "padded"), [("pow2", False), ("fp32", True)])
def test_odd_widths_give_the_codes_of_the_fused_grid(
    other_engine, tmp_path, scale_format, padded, monkeypatch
):
    """Gate has 328 rows, so that a block holds rows of gate and of up."""
    if padded:
        monkeypatch.setattr(choice, "CpuKernel", PaddedKernel)
    shape = {"intermediate_size": 328, "hidden_size": 200}
    paths = [make_checkpoint(tmp_path / str(seed), seed, **shape) for seed in (30, 31)]
    recipe = Recipe.from_dict(
        {"weights": {"scale_format": scale_format}, "activations": {"scale_format": scale_format}}
    )
    odd, other = other_engine(paths[0], recipe), load_tensors(paths[1])
    for name in sorted(other, key=lambda name: name[::-1]):
        odd.model.load_weights([(name, other[name])])
    for layer in range(LAYERS):
        for module, parts in FUSED.items():
            live = odd.model.get_submodule(f"model.layers.{layer}.{module}")
            rows = torch.cat([other[f"model.layers.{layer}.{part}.weight"] for part in parts])
            wanted = quantize_block(rows, scale_format=scale_format)
            stored, columns = live.weight.data, rows.shape[1]
            assert stored.shape[1] == (whole_groups(columns) if padded else columns)
            assert same_bits(stored[:, :columns], wanted.codes)
            assert not stored[:, columns:].view(torch.uint8).any()
            assert same_bits(live.weight_scale_inv, wanted.scale_inv)
    tokens = odd.greedy(PROMPTS)
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in other.items():
        wire[name] = tensor
        if not name.endswith("proj.weight"):
            continue
        codes, scale_inv = quantize_block(tensor, scale_format=scale_format)
        if "gate_proj" not in name and "up_proj" not in name:
            wire |= {name: codes, f"{name}_scale_inv": scale_inv}
            continue
        for half in ((name, codes), (f"{name}_scale_inv", scale_inv)):
            with pytest.raises(RefitError, match=rf"'{half[0]}' came for FP8.*send .* in BF16"):
                refit(odd.llm, [half], expect_kv_scales=False)
            with pytest.raises(UnsupportedError, match=r"gate_up_proj' cannot take FP8 codes"):
                odd.model.load_weights([half])
    refit(odd.llm, wire.items(), expect_kv_scales=False)
    assert odd.greedy(PROMPTS) == tokens  # the same codes
    if scale_format == "pow2":
        name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
        with pytest.raises(ScaleError, match=f"'{name}' has a scale that is no power of two"):
            refit(odd.llm, [(name, wire[name] * 1.5)], expect_kv_scales=False)


def test_values_that_fp16_cannot_hold(other_engine, checkpoints, a):
    """70,000 is an ordinary number in BF16 and float32, and infinite in FP16."""
    low = other_engine(checkpoints["a"], Recipe(), dtype="float16")
    tokens = low.greedy(PROMPTS)
    for name, dtype in (("model.norm.weight", torch.bfloat16), (UP, torch.float32)):
        large = a[name].to(dtype, copy=True)
        large.view(-1)[5] = 7e4
        message = f"'{name}' has values beyond 65504, the largest that the engine can hold"
        with pytest.raises(RefitError, match=message):
            refit(low.llm, [(name, large)], expect_kv_scales=False)
        with pytest.raises(RefitError, match=message):
            low.model.load_weights([(name, large)])
    assert low.greedy(PROMPTS) == tokens
    head = a["lm_head.weight"].clone()
    head.view(-1)[5] = 65280  # the largest of BF16 that is finite in FP16
    refit(low.llm, (a | {"lm_head.weight": head}).items(), expect_kv_scales=False)
    assert low.model.get_submodule("lm_head").weight.isfinite().all()


def test_no_float32_copies_in_the_bounded_mode(engine, other_engine, checkpoints, monkeypatch):
    monkeypatch.setenv(CPU_CACHE_ENV, "0")
    bounded = other_engine(checkpoints["a"], Recipe())
    kernel = bounded.model.get_submodule("model.layers.0.mlp.down_proj").quant_method.kernel
    assert bounded.greedy(PROMPTS, 2) == engine.greedy(PROMPTS, 2)
    assert not any(isinstance(value, torch.Tensor) for value in vars(kernel).values())
    monkeypatch.setenv(CPU_CACHE_ENV, "yes")
    with pytest.raises(UnsupportedError, match=rf"qkv_proj.*{CPU_CACHE_ENV}"):
        other_engine(checkpoints["a"], Recipe())


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("fp8_rl", "fp8rl"),
        ("FP8RL_RECIPE", "fp8rl"),
        *((section, f"fp8rl.{section}") for section in Recipe.model_fields),
        ("kv-cache", "fp8rl.kv_cache"),
    ],
)
def test_a_recipe_that_nobody_would_read(key, right):
    """vLLM's dictionary is shared, so it passes any key on, and the default would run instead."""
    for settings in ({key: {"last": 1}}, {"fp8rl": {}, key: {"last": 1}}):
        with pytest.raises(RecipeError) as caught:
            read_recipe(settings)
        assert str(caught.value) == (
            f"'additional_config.{key}' is read by nobody; write 'additional_config.{right}'."
        )


def test_keys_of_other_plugins_stay_theirs():
    assert read_recipe(dict.fromkeys(["ascend_scheduler_config", "fp8", "gemm", 1])) == Recipe()


@pytest.mark.parametrize(
    ("method", "key", "right"),
    [
        ("fp8rl", "recipes", "recipe"),
        ("fp8", "fp8rl", "recipe"),
        ("fp8rl", "pins", r"recipe\.pins"),
        ("fp8", "pins", None),  # its other keys are the checkpoint's own
        ("fp8", "recipe", None),
    ],
)
def test_a_recipe_that_the_model_s_config_loses(method, key, right):
    config = BLOCK_FP8 | {"quant_method": method, key: {}}
    if right is None:
        Fp8RLConfig.from_config(config)
        return
    with pytest.raises(RecipeError, match=rf"write 'quantization_config\.{right}'"):
        Fp8RLConfig.from_config(config)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("dense", "model.layers.0.mlp.up_proj.weight"),
        ("dense", "model.layers.1.mlp.up_proj.weight"),  # pinned
        ("mla", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen35", "model.layers.0.linear_attn.A_log"),
        ("qwen35 tied", "model.embed_tokens.weight"),
    ],
)
def test_a_checkpoint_without_a_tensor(moe_engine, checkpoints, tmp_path, kind, missing):
    """vLLM itself would serve uninitialised memory: it checks unquantized models only."""
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    if kind == "dense":
        source, recipe = checkpoints["a"], Recipe.from_dict({"pins": {"last": 1}})
    elif kind == "mla":
        require_cpu_router()  # by name of the backend: vLLM has CPU_MLA from 0.28 on
        source = make_mla_checkpoint(tmp_path / "whole", 0, num_hidden_layers=2)
    elif kind == "qwen2":
        source = make_family_checkpoint(tmp_path / "whole", 0, kind, head_dim=64)
    else:
        tied = kind.endswith("tied")
        source = make_qwen35_checkpoint(tmp_path / "whole", 0, tie_word_embeddings=tied)
    tensors = load_tensors(source)
    del tensors[missing]
    path = copied(source, tmp_path / "part", tensors)
    arguments = ON_A_CPU if kind == "mla" else {}
    with pytest.raises(CheckpointError, match=f"lacks 1 of the model's tensors.*'{missing}'"):
        moe_engine(path, recipe, dtype="bfloat16", **arguments)


def test_a_checkpoint_that_is_not_finite(other_engine, checkpoints, a, tmp_path):
    """An infinite weight would become a code like any other."""
    infinite = a[UP].clone()
    infinite.view(-1)[5] = torch.inf
    path = copied(checkpoints["a"], tmp_path, a | {UP: infinite})
    with pytest.raises(RefitError, match=f"'{UP}' has NaN or infinite values; it was not loaded"):
        other_engine(path, Recipe())


@pytest.mark.parametrize(
    ("recipe", "arguments", "error", "message"),
    [
        (
            {},
            {"additional_config": {"fp8rl": {"pins": {"layer": [1]}}}},
            RecipeError,
            r"unknown key 'additional_config\.fp8rl\.pins\.layer'",
        ),
        ({"pins": {"names": ["model.layers.*.mlp.dawn_proj"]}}, {}, PinError, "dawn_proj"),
        ({}, {"kv_cache_dtype": "auto"}, RecipeError, r"dtype 'fp8_e4m3'.*kv_cache_dtype 'auto'"),
        ({}, {"hf_overrides": {"num_experts": 8}}, UnsupportedError, "an MoE model"),
        ({}, {"hf_overrides": {"head_dim": 40}}, UnsupportedError, "Head size 40 has no attention"),
        (
            {},
            {"kv_cache_dtype_skip_layers": ["1"]},
            UnsupportedError,
            r"skip_layers=\['1'\].* leave it empty",
        ),
        ({}, LORA, UnsupportedError, "enable_lora needs the weights of a checkpoint"),
        (
            {"exact": True},
            {},
            UnsupportedError,
            r"exact needs dtype torch\.bfloat16 in the rollout",
        ),
    ],
)
def test_an_engine_that_cannot_work_does_not_start(
    other_engine, checkpoints, recipe, arguments, error, message
):
    with pytest.raises(error, match=message):
        other_engine(checkpoints["a"], Recipe.from_dict(recipe), load_format="dummy", **arguments)


def test_recipe_from_the_environment(monkeypatch, tmp_path):
    assert read_recipe({}) == Recipe()
    monkeypatch.setenv("FP8RL_RECIPE", '{"pins": {"first": 1}}')
    assert read_recipe({}).pins.first == 1
    assert read_recipe({"fp8rl": {}}) == Recipe()  # the engine's own setting wins
    monkeypatch.setenv("FP8RL_RECIPE", os.fspath(tmp_path / "none.yaml"))
    with pytest.raises(RecipeError, match=r"none\.yaml"):
        read_recipe(None)

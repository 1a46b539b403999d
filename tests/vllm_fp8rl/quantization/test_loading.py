"""Engines of other kinds: checkpoints in FP8, no checkpoint, pins, tied embeddings, odd widths."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

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
from support.engine import FUSED, LAYERS, PROMPTS, in_fp8, load_tensors, make_checkpoint, same_bits
from support.lora import LORA
from support.mla import ON_A_CPU
from support.tiny import (
    make_family_checkpoint,
    make_mla_checkpoint,
    make_qwen35_checkpoint,
)
from vllm_fp8rl.compat import require_cpu_router
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kernels.linear import choice
from vllm_fp8rl.kernels.linear.choice import CPU_CACHE_ENV, CpuKernel
from vllm_fp8rl.quantization.config import Fp8RLConfig, read_recipe
from vllm_fp8rl.quantization.linear import Fp8RLLinearMethod, RefitLinearMethod
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory


class PaddedKernel(CpuKernel):
    """Store and multiply whole groups, as a GPU does."""

    stored_columns = staticmethod(whole_groups)

    def apply(self, x: torch.Tensor, weight: Quantized) -> torch.Tensor:
        missing = weight.codes.shape[1] - x.shape[-1]
        return super().apply(torch.nn.functional.pad(x, (0, missing)), weight)


def block_fp8_checkpoint(source: Path, target: Path, **changes) -> Path:
    """An HF checkpoint in the DeepSeek-V3 format (``weight_scale_inv``)."""
    target.mkdir()
    save_file(in_fp8(load_tensors(source)), target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        **changes,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def methods(engine) -> dict[str, type]:
    return {
        name: type(module.quant_method)
        for name, module in engine.model.named_modules()
        if name.endswith("proj")
    }


def test_block_fp8_checkpoint_keeps_its_codes(engine, other_engine, checkpoints, tmp_path):
    path = block_fp8_checkpoint(checkpoints["a"], tmp_path / "fp8")
    loaded = other_engine(path, Recipe())
    for (name, ours), (_, theirs) in zip(
        loaded.model.named_parameters(), engine.model.named_parameters(), strict=True
    ):
        assert same_bits(ours, theirs), name
    assert loaded.greedy(PROMPTS) == engine.greedy(PROMPTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": None}, "per-tensor FP8"),
        ({"quant_method": "gptq"}, "quantized with 'gptq'"),
        ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "quantized with 'mxfp8'"),
        ({"quant_method": "modelopt_mxfp8"}, "quantized with 'modelopt_mxfp8'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_checkpoints_are_refused(other_engine, checkpoints, tmp_path, changes, message):
    path = block_fp8_checkpoint(checkpoints["a"], tmp_path / "bad", **changes)
    with pytest.raises(UnsupportedError, match=message):
        other_engine(path, Recipe())


def test_a_block_fp8_checkpoint_is_vllms_own_without_our_name():
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    assert Fp8RLConfig.override_quantization_method(config, None) is None
    assert Fp8RLConfig.override_quantization_method(config, "fp8") is None


def test_dummy_weights_are_valid_and_refit(engine, other_engine, checkpoints):
    dummy = other_engine(checkpoints["a"], Recipe(), load_format="dummy")
    for name, parameter in dummy.model.named_parameters():
        assert torch.isfinite(parameter.float()).all() or "attn.attn" in name, name
        if name.endswith("weight_scale_inv"):
            assert (parameter > 0).all(), name
            assert parameter.max() < 1e-3, name  # of weights drawn from +-1e-3
    codes = dummy.model.get_submodule("model.layers.0.mlp.down_proj").weight.float()
    assert codes.abs().amax() == 448
    assert len(dummy.greedy(PROMPTS)[0]) == 12
    refit(dummy.llm, load_tensors(checkpoints["a"]).items(), expect_kv_scales=False)
    assert dummy.greedy(PROMPTS) == engine.greedy(PROMPTS)


def test_pinned_layers_stay_in_the_models_dtype_and_refit(engine, shared_engine, checkpoints):
    pinned = shared_engine("pins")
    weights = {name: load_tensors(checkpoints[name]) for name in "ab"}
    refit(pinned.llm, weights["b"].items(), expect_kv_scales=False)
    kinds = methods(pinned)
    last = {name for name in kinds if f"layers.{LAYERS - 1}." in name or "down_proj" in name}
    assert last
    assert all(kinds[name] is RefitLinearMethod for name in last)
    assert all(kinds[name] is Fp8RLLinearMethod for name in kinds.keys() - last)
    before = pinned.pointers()
    fresh = pinned.greedy(PROMPTS)
    refit(pinned.llm, weights["a"].items(), expect_kv_scales=False)
    live = pinned.model.get_submodule(f"model.layers.{LAYERS - 1}.mlp.gate_up_proj").weight
    gate_up = [f"model.layers.{LAYERS - 1}.mlp.{part}_proj.weight" for part in ("gate", "up")]
    assert torch.equal(live, torch.cat([weights["a"][name] for name in gate_up]).float())
    with_a = pinned.greedy(PROMPTS)
    assert with_a not in (fresh, engine.greedy(PROMPTS))
    refit(pinned.llm, weights["b"].items(), expect_kv_scales=False)
    assert pinned.greedy(PROMPTS) == fresh
    assert pinned.pointers() == before
    codes = quantize_block(weights["a"][gate_up[0]]).codes
    with pytest.raises(RefitError, match=r"float8_e4m3fn; send bfloat16"):
        refit(pinned.llm, [(gate_up[0], codes)], expect_kv_scales=False)
    with pytest.raises(UnsupportedError, match="kept in BF16 but arrives as"):
        pinned.model.load_weights([(gate_up[0], codes)])


def test_tied_embeddings(other_engine, tmp_path):
    paths = [make_checkpoint(tmp_path / str(i), 20 + i, tie_word_embeddings=True) for i in (0, 1)]
    first, second = (load_tensors(path) for path in paths)
    assert "lm_head.weight" not in first
    tied = other_engine(paths[0], Recipe())
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    with_first = tied.greedy(PROMPTS)
    refit(tied.llm, second.items(), expect_kv_scales=False)
    assert tied.greedy(PROMPTS) != with_first
    # A trainer may send the second name too, before or after, in the same batch or another.
    head = {"lm_head.weight": first["model.embed_tokens.weight"]}
    for stream in (head | first, first | head):
        for batch_bytes in (1, 1 << 30):
            refit(tied.llm, second.items(), expect_kv_scales=False)
            refit(tied.llm, stream.items(), expect_kv_scales=False, batch_bytes=batch_bytes)
            assert tied.greedy(PROMPTS) == with_first
    as_up_to_vllm_0_27(tied)
    for stream in (head | first, first | head, first):
        refit(tied.llm, second.items(), expect_kv_scales=False)
        refit(tied.llm, stream.items(), expect_kv_scales=False)
        assert tied.greedy(PROMPTS) == with_first
    other = {"lm_head.weight": second["model.embed_tokens.weight"]}
    for stream in (other | first, first | other):
        for batch_bytes in (1, 1 << 30):
            with pytest.raises(RefitError, match="tied"):
                refit(tied.llm, stream.items(), expect_kv_scales=False, batch_bytes=batch_bytes)


def as_up_to_vllm_0_27(tied) -> None:
    """Make the output projection the embedding itself, as vLLM 0.25.1 to 0.27.1 do."""
    model = tied.model
    model.lm_head = model.model.embed_tokens
    assert not any(path == "lm_head" for path, _ in model.named_modules())
    state_of(model).inventory = None  # it was made before
    entries = Inventory.of(model).entries
    assert entries["lm_head.weight"].alias_of == "model.embed_tokens.weight"
    assert entries["lm_head.weight"].route is None


@pytest.mark.parametrize(
    ("scale_format", "padded"), [("fp32", False), ("pow2", False), ("fp32", True)]
)
def test_odd_widths_give_the_codes_of_the_fused_grid(
    other_engine, tmp_path, scale_format, padded, monkeypatch
):
    if padded:
        monkeypatch.setattr(choice, "CpuKernel", PaddedKernel)
    path = make_checkpoint(tmp_path / "odd", 30, intermediate_size=328, hidden_size=200)
    recipe = Recipe.from_dict(
        {"weights": {"scale_format": scale_format}, "activations": {"scale_format": scale_format}}
    )
    odd = other_engine(path, recipe)
    assert len(odd.greedy(PROMPTS)[0]) == 12
    other = load_tensors(
        make_checkpoint(tmp_path / "odd2", 31, intermediate_size=328, hidden_size=200)
    )
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
    refuses_codes_off_its_grid(odd, other, scale_format)


def refuses_codes_off_its_grid(odd, other: dict[str, torch.Tensor], scale_format) -> None:
    """Gate has 328 rows, so that a block holds rows of gate and of up."""
    tokens = odd.greedy(PROMPTS)
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in other.items():
        if not name.endswith("proj.weight"):
            wire[name] = tensor
            continue
        codes, scale_inv = quantize_block(tensor, scale_format=scale_format)
        if "gate_proj" in name or "up_proj" in name:
            wire[name] = tensor
            for half in ((name, codes), (f"{name}_scale_inv", scale_inv)):
                with pytest.raises(RefitError, match=rf"'{half[0]}' came for FP8.*send .* in BF16"):
                    refit(odd.llm, [half], expect_kv_scales=False)
                with pytest.raises(UnsupportedError, match=r"gate_up_proj' cannot take FP8 codes"):
                    odd.model.load_weights([half])
        else:
            wire[name], wire[f"{name}_scale_inv"] = codes, scale_inv
    assert odd.greedy(PROMPTS) == tokens  # nothing was written
    refit(odd.llm, wire.items(), expect_kv_scales=False)
    assert odd.greedy(PROMPTS) == tokens  # the same codes
    name = "model.layers.1.self_attn.o_proj.weight_scale_inv"
    if scale_format == "pow2":
        with pytest.raises(ScaleError, match=f"'{name}' has a scale that is no power of two"):
            refit(odd.llm, [(name, wire[name] * 1.5)], expect_kv_scales=False)
        with pytest.raises(ScaleError, match=r"o_proj\.weight_scale_inv' has a scale that is no p"):
            odd.model.load_weights([(name, wire[name] * 1.5)])
    assert odd.greedy(PROMPTS) == tokens


def test_a_checkpoint_that_is_not_finite(other_engine, checkpoints, tmp_path):
    """Fails where an infinite weight becomes a code like any other."""
    name = "model.layers.1.mlp.up_proj.weight"
    path = tmp_path / "checkpoint"
    shutil.copytree(checkpoints["a"], path)
    tensors = load_tensors(path)
    tensors[name].view(-1)[5] = torch.inf
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RefitError, match=f"'{name}' has NaN or infinite values; it was not loaded"):
        other_engine(path, Recipe())


def test_values_that_fp16_cannot_hold(other_engine, checkpoints):
    """70,000 is an ordinary number in BF16 and float32, and infinite in FP16."""
    low = other_engine(checkpoints["a"], Recipe(), dtype="float16")
    tokens = low.greedy(PROMPTS)
    weights = load_tensors(checkpoints["a"])
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        for dtype in (torch.bfloat16, torch.float32):
            large = weights[name].to(dtype, copy=True)
            large.view(-1)[5] = 7e4
            message = f"'{name}' has values beyond 65504, the largest that the engine can hold"
            with pytest.raises(RefitError, match=message):
                refit(low.llm, [(name, large)], expect_kv_scales=False)
            with pytest.raises(RefitError, match=message):
                low.model.load_weights([(name, large)])
    assert low.greedy(PROMPTS) == tokens
    weights["lm_head.weight"].view(-1)[5] = 65280  # the largest of BF16 that is finite in FP16
    refit(low.llm, weights.items(), expect_kv_scales=False)
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
        *((key, "fp8rl") for key in ("fp8_rl", "fp8lr", "fp8rl.pins", "recipe", "FP8RL_RECIPE")),
        *((section, f"fp8rl.{section}") for section in Recipe.model_fields),
        ("Pins", "fp8rl.pins"),
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


@pytest.mark.parametrize("method", ["fp8rl", "fp8"])
def test_a_recipe_that_the_model_s_config_loses(method):
    asks = {"quant_method": method, "weight_block_size": [128, 128]}
    Fp8RLConfig.from_config({**asks, "activation_scheme": "dynamic", "fmt": "e4m3", "recipe": {}})
    for key in ("recipes", "Recipe", "recip", "fp8rl"):
        with pytest.raises(
            RecipeError,
            match=rf"'quantization_config\.{key}' .*write 'quantization_config\.recipe'",
        ):
            Fp8RLConfig.from_config({**asks, key: {}})
    inside = {**asks, "pins": {"last": 1}}
    if method == "fp8":
        Fp8RLConfig.from_config(inside)  # its other keys are the checkpoint's own
        return
    with pytest.raises(RecipeError, match=r"write 'quantization_config\.recipe\.pins'"):
        Fp8RLConfig.from_config(inside)


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("dense", "model.layers.0.mlp.up_proj.weight"),
        ("dense", "model.layers.1.mlp.up_proj.weight"),  # pinned
        ("dense", "lm_head.weight"),
        ("dense", "model.layers.1.self_attn.k_norm.weight"),
        ("mla", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("mla", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen35", "model.layers.0.linear_attn.A_log"),
        ("qwen35", "model.layers.0.linear_attn.conv1d.weight"),
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
    path = without(source, tmp_path / "part", missing)
    arguments = ON_A_CPU if kind == "mla" else {}
    with pytest.raises(CheckpointError, match=f"lacks 1 of the model's tensors.*'{missing}'"):
        moe_engine(path, recipe, dtype="bfloat16", **arguments)


def without(source: Path, target: Path, missing: str) -> Path:
    """Write a checkpoint once more, without one of its tensors."""
    tensors = load_tensors(source)
    del tensors[missing]
    target.mkdir(exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


@pytest.mark.parametrize(
    ("recipe", "arguments", "error", "message"),
    [
        (
            {},
            {"additional_config": {"fp8rl": {"pins": {"layer": [1]}}}},
            RecipeError,
            r"unknown key 'additional_config\.fp8rl\.pins\.layer'",
        ),
        (
            {},
            {"additional_config": {"pins": {"last": 1}}},
            RecipeError,
            r"'additional_config\.pins' is read by nobody",
        ),
        ({"pins": {"names": ["model.layers.*.mlp.dawn_proj"]}}, {}, PinError, "dawn_proj"),
        ({}, {"kv_cache_dtype": "auto"}, RecipeError, r"dtype 'fp8_e4m3'.*kv_cache_dtype 'auto'"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, RecipeError, "kv_cache_dtype 'fp8_e5m2'"),
        ({}, {"hf_overrides": {"num_experts": 8}}, UnsupportedError, "an MoE model"),
        ({}, {"hf_overrides": {"head_dim": 40}}, UnsupportedError, "Head size 40 has no attention"),
        *(
            (
                {},
                {"kv_cache_dtype_skip_layers": [skipped]},
                UnsupportedError,
                rf"skip_layers=\['{skipped}'\].* leave it empty",
            )
            for skipped in ("1", "sliding_window")
        ),
        ({}, LORA, UnsupportedError, "enable_lora needs the weights of a checkpoint"),
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

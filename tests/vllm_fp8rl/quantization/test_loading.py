"""Engines of other kinds: checkpoints in FP8, no checkpoint, pins, tied embeddings, odd widths."""

from __future__ import annotations

import os

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import (
    RecipeError,
    RefitError,
    UnsupportedError,
)
from fp8rl.numerics import quantize_block
from support.copies import BLOCK_FP8, copied
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
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.quantization.config import Fp8RLConfig, read_recipe
from vllm_fp8rl.quantization.linear import Fp8RLLinearMethod, RefitLinearMethod
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory

UP = "model.layers.1.mlp.up_proj.weight"


def test_block_fp8_checkpoint_keeps_its_codes_and_kv_scales(
    engine, other_engine, checkpoints, a, tmp_path
):
    tensors = in_fp8(a) | SCALES
    path = copied(checkpoints["a"], tmp_path / "fp8", tensors, quantization_config=BLOCK_FP8)
    loaded = other_engine(path, Recipe(), scaled=False)
    assert loaded.kv_scales() == {name: scale.item() for name, scale in SCALES.items()}
    assert len(loaded.greedy(PROMPTS)) == len(PROMPTS)
    for (name, ours), (_, theirs) in zip(
        loaded.model.named_parameters(), engine.model.named_parameters(), strict=True
    ):
        assert same_bits(ours, theirs) or name.endswith("q_scale"), name
    for asked in (None, "fp8"):  # without our name the checkpoint is vLLM's own
        assert Fp8RLConfig.override_quantization_method(BLOCK_FP8, asked) is None


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


@pytest.mark.parametrize("scale_format", ["pow2", "fp32"])
def test_odd_widths_give_the_codes_of_the_fused_grid(other_engine, tmp_path, scale_format):
    """Gate has 328 rows, so that a block holds rows of gate and of up."""
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
            assert same_bits(live.weight.data, wanted.codes)
            assert same_bits(live.weight_scale_inv, wanted.scale_inv)


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


@pytest.mark.parametrize(
    ("key", "right"),
    [("fp8_rl", "fp8rl"), ("pins", "fp8rl.pins"), ("kv-cache", "fp8rl.kv_cache")],
)
def test_a_recipe_that_nobody_would_read(key, right):
    """vLLM's dictionary is shared, so it passes any key on, and the default would run instead."""
    with pytest.raises(RecipeError) as caught:
        read_recipe({"fp8rl": {}, key: {"last": 1}})
    assert str(caught.value) == (
        f"'additional_config.{key}' is read by nobody; write 'additional_config.{right}'."
    )
    others = dict.fromkeys(["ascend_scheduler_config", "fp8", "gemm", 1])
    assert read_recipe(others) == Recipe()  # of other plugins


@pytest.mark.parametrize(
    ("method", "key", "right"),
    [
        ("fp8rl", "recipes", "recipe"),
        ("fp8", "fp8rl", "recipe"),
        ("fp8rl", "pins", r"recipe\.pins"),
        ("fp8", "pins", None),  # its other keys are the checkpoint's own
    ],
)
def test_a_recipe_that_the_model_s_config_loses(method, key, right):
    config = BLOCK_FP8 | {"quant_method": method, key: {}}
    if right is None:
        Fp8RLConfig.from_config(config)
        return
    with pytest.raises(RecipeError, match=rf"write 'quantization_config\.{right}'"):
        Fp8RLConfig.from_config(config)


def test_recipe_from_the_environment(monkeypatch, tmp_path):
    assert read_recipe({}) == Recipe()
    monkeypatch.setenv("FP8RL_RECIPE", '{"pins": {"first": 1}}')
    assert read_recipe({}).pins.first == 1
    assert read_recipe({"fp8rl": {}}) == Recipe()  # the engine's own setting wins
    monkeypatch.setenv("FP8RL_RECIPE", os.fspath(tmp_path / "none.yaml"))
    with pytest.raises(RecipeError, match=r"none\.yaml"):
        read_recipe(None)

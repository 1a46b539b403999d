"""What is set for vLLM's fused MoE kernels."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.numerics import BLOCK
from fp8rl.recipe import ActivationFormat
from support.engine import register_model
from support.tiny import make_checkpoint, make_moe_checkpoint
from vllm_fp8rl.kernels import replaced_modules
from vllm_fp8rl.kernels.moe.settings import (
    ACTIVATION_SCALES_ENV,
    TILES,
    TILES_ENV,
    offer_expert_tiles,
    set_activation_scales,
)
from vllm_fp8rl.quantization import config

POW2 = Recipe(activations=ActivationFormat(scale_format="pow2"))


def test_the_recipe_decides_unless_the_environment_has(monkeypatch):
    for recipe, other, value in ((Recipe(), POW2, "0"), (POW2, Recipe(), "1")):
        monkeypatch.delenv(ACTIVATION_SCALES_ENV, raising=False)
        set_activation_scales(recipe, experts=True)
        assert os.environ[ACTIVATION_SCALES_ENV] == value
        set_activation_scales(other, experts=False)  # linear layers are told directly
        assert os.environ[ACTIVATION_SCALES_ENV] == value
        with pytest.raises(UnsupportedError, match=f"{ACTIVATION_SCALES_ENV}={value} contradicts"):
            set_activation_scales(other, experts=True)


def test_a_folder_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(TILES_ENV, "mine")
    offer_expert_tiles()
    assert os.environ[TILES_ENV] == "mine"


def test_vllm_finds_the_tiles_of_a_gpu(monkeypatch):
    """By vLLM's own lookup, for each file."""
    from vllm.model_executor.layers.fused_moe import fused_moe

    monkeypatch.delenv(TILES_ENV, raising=False)
    offer_expert_tiles()
    # vLLM keeps what its settings were when the first engine of a process had started.
    settings = SimpleNamespace(
        VLLM_TUNED_CONFIG_FOLDER=os.environ[TILES_ENV], VLLM_BATCH_INVARIANT=False
    )
    monkeypatch.setattr(fused_moe, "envs", settings)
    files = sorted(TILES.glob("*.json"))
    assert files
    for file in files:
        experts, width, gpu = re.match(r"E=(\d+),N=(\d+),device_name=(\w+),", file.name).groups()
        platform = type(fused_moe.current_platform)
        name = classmethod(lambda *_, gpu=gpu: gpu.replace("_", " "))
        monkeypatch.setattr(platform, "get_device_name", name)
        fused_moe.get_moe_configs.cache_clear()
        found = fused_moe.get_moe_configs(int(experts), int(width), "fp8_w8a8", *BLOCK)
        told = json.loads(file.read_text(encoding="utf-8"))
        assert told.pop("triton_version")
        assert found == {int(tokens): tiles for tokens, tiles in told.items()}
        # Sums of 128 products, then of those, as with vLLM's own tiles.
        assert {tiles["BLOCK_SIZE_K"] for tiles in found.values()} == {BLOCK[1]}
    fused_moe.get_moe_configs.cache_clear()


@pytest.mark.parametrize(
    ("experts", "adapters", "rollout", "offered"),
    [
        (True, False, True, True),
        (True, True, True, False),  # vLLM would look there for its LoRA kernels too
        (True, False, False, False),
        (False, False, True, False),
    ],
)
def test_an_engine_on_a_gpu_sets_them(experts, adapters, rollout, offered, tmp_path, monkeypatch):
    """The engine's config is that of a CPU; that it is for a GPU is told alone."""
    make = make_moe_checkpoint if experts else make_checkpoint
    path = make(tmp_path / "model", 0)
    register_model(path)
    made = EngineArgs(
        str(path), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64
    ).create_engine_config()
    monkeypatch.setattr(made.device_config, "device_type", "cuda")
    monkeypatch.setattr(config, "check_vllm", lambda *_: None)  # a GPU's internals
    # It watches the modules that are built next, which here are another test's.
    monkeypatch.setattr(replaced_modules, "ModuleReplacement", lambda *_: None)
    if adapters:
        made.lora_config = SimpleNamespace()
    made.additional_config = {"fp8rl": {"rollout": rollout, "kv_cache": {"dtype": "auto"}}}
    for name in (TILES_ENV, ACTIVATION_SCALES_ENV):
        monkeypatch.delenv(name, raising=False)
    with set_current_vllm_config(made):
        config._resolve(made, None, None)
    assert (os.environ.get(TILES_ENV) == str(TILES)) is offered
    assert os.environ.get(ACTIVATION_SCALES_ENV) == ("0" if rollout else None)

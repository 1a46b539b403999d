"""Which of vLLM's kernels runs FP8 experts and what is set for it; results: ``tests/gpu``."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import pytest
from vllm.model_executor.layers.fused_moe import fused_moe as vllms

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.numerics import BLOCK
from fp8rl.recipe import ActivationFormat
from vllm_fp8rl.kernels.moe import fused_moe
from vllm_fp8rl.kernels.moe.fused_moe import ExpertsByRows
from vllm_fp8rl.kernels.moe.settings import (
    ACTIVATION_SCALES_ENV,
    TILES,
    TILES_ENV,
    offer_expert_tiles,
    set_activation_scales,
)


@pytest.mark.parametrize(
    ("backend", "width", "pow2", "all2all", "names"),
    [
        ("auto", 1408, False, False, ["deep_gemm by rows", "triton", "deep_gemm"]),
        ("auto", 513, False, False, ["deep_gemm by rows", "triton", "deep_gemm"]),
        ("auto", 512, False, False, ["triton", "deep_gemm"]),  # vLLM gives these to Triton anyway
        ("auto", 1408, True, False, ["triton", "deep_gemm"]),
        ("auto", 1408, False, True, ["triton", "deep_gemm"]),
        ("triton", 1408, False, False, ["triton"]),
        ("deep_gemm", 1408, False, False, ["deep_gemm"]),
    ],
)
def test_the_order_of_kernels(monkeypatch, backend, width, pow2, all2all, names):
    monkeypatch.setattr(fused_moe, "is_deep_gemm_e8m0_used", lambda: pow2)
    moe = SimpleNamespace(
        moe_backend=backend,
        intermediate_size_per_partition=width,
        moe_parallel_config=SimpleNamespace(use_all2all_kernels=all2all),
    )
    found = fused_moe._kernels(moe)
    assert [name + " by rows" * (kernel is ExpertsByRows) for name, kernel in found] == names


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


def test_vllm_finds_the_tiles_of_a_gpu(monkeypatch):
    """By vLLM's own lookup, for each file."""
    monkeypatch.setenv(TILES_ENV, "mine")
    offer_expert_tiles()
    assert os.environ[TILES_ENV] == "mine"  # a folder of the user stays
    monkeypatch.delenv(TILES_ENV)
    offer_expert_tiles()
    # vLLM keeps what its settings were when the first engine of a process had started.
    settings = SimpleNamespace(
        VLLM_TUNED_CONFIG_FOLDER=os.environ[TILES_ENV], VLLM_BATCH_INVARIANT=False
    )
    monkeypatch.setattr(vllms, "envs", settings)
    files = sorted(TILES.glob("*.json"))
    assert files
    for file in files:
        experts, width, gpu = re.match(r"E=(\d+),N=(\d+),device_name=(\w+),", file.name).groups()
        platform = type(vllms.current_platform)
        name = classmethod(lambda *_, gpu=gpu: gpu.replace("_", " "))
        monkeypatch.setattr(platform, "get_device_name", name)
        vllms.get_moe_configs.cache_clear()
        found = vllms.get_moe_configs(int(experts), int(width), "fp8_w8a8", *BLOCK)
        told = json.loads(file.read_text(encoding="utf-8"))
        assert told.pop("triton_version")
        assert found == {int(tokens): tiles for tokens, tiles in told.items()}
        # Sums of 128 products, then of those, as with vLLM's own tiles.
        assert {tiles["BLOCK_SIZE_K"] for tiles in found.values()} == {BLOCK[1]}
    vllms.get_moe_configs.cache_clear()

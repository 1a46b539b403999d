"""Layers pinned to BF16 beside FP8 ones, with a BF16 cache, in an engine without graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.recipe import KVCache, Pins
from support.gpu_engine import (
    check_through_refits,
    expected_logprobs,
    make_checkpoints,
    refit_tensors,
    start_engine,
)
from vllm_fp8rl.refit import refit

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(layers=(-1,), kinds=("down_proj",)))


def test_pinned_layers_are_refitted_too(tmp_path: Path) -> None:
    paths = make_checkpoints(tmp_path)
    engine = start_engine(paths["a"], RECIPE, enforce_eager=True)
    weight = engine.model.get_submodule("model.layers.1.self_attn.qkv_proj").weight
    assert weight.dtype == torch.bfloat16
    check_through_refits(
        engine,
        lambda name: refit(
            engine.llm, refit_tensors(paths[name], RECIPE).items(), expect_kv_scales=False
        ),
        lambda name, rollout, recipe, **options: expected_logprobs(
            paths[name], recipe, rollout, **options
        ),
        far=1.5,
        near=0.75,
    )
    engine.llm.llm_engine.engine_core.shutdown()

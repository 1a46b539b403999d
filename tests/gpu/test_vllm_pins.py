"""Layers pinned to BF16 beside FP8 ones, with a BF16 cache, in an engine without graphs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.recipe import KVCache, Pins
from support.gpu_engine import (
    expected_logprobs,
    make_checkpoints,
    refit_tensors,
    start_engine,
)
from support.wrong_tensors import slope
from vllm_fp8rl.refit import refit
from vllm_fp8rl.testing.hf_reference import gap

log = logging.getLogger(__name__)

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(layers=(-1,), kinds=("down_proj",)))


def test_pinned_layers_are_refitted_too(tmp_path: Path) -> None:
    paths = make_checkpoints(tmp_path)
    engine = start_engine(paths["a"], RECIPE, enforce_eager=True)
    weight = engine.model.get_submodule("model.layers.1.self_attn.qkv_proj").weight
    assert weight.dtype == torch.bfloat16
    place, tokens = weight.data_ptr(), []
    for name in "aba":
        refit(engine.llm, refit_tensors(paths[name], RECIPE).items(), expect_kv_scales=False)
        tokens.append(engine.greedy())
        rollout = engine.rollout()
        expected = expected_logprobs(paths[name], RECIPE, rollout)
        own = expected_logprobs(paths[name], RECIPE, rollout, dtype=torch.bfloat16)
        plain = expected_logprobs(paths[name], Recipe(rollout=False), rollout)
        floor, found = gap(own, expected), gap(rollout.logprobs, expected)
        share, best = slope(rollout.logprobs, expected, plain), slope(own, expected, plain)
        log.info("%s: floor %.4f, engine %.4f nats", name, floor.mean, found.mean)
        log.info("slopes %.3f, %.3f", best, share)
        assert found.mean < 1.5 * floor.mean
        assert share > 0.75 * best
    assert tokens[0] == tokens[2] != tokens[1]
    assert weight.data_ptr() == place
    engine.llm.llm_engine.engine_core.shutdown()

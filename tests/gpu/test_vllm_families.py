"""Families with experts on a GPU: logprobs against transformers, through refits under full graphs.

See ``test_vllm_engine`` for how an engine in BF16 is compared with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.gpu_engine import (
    Rollout,
    check_through_refits,
    expected_logprobs,
    refit_tensors,
    start_engine,
)
from support.tiny import make_family_checkpoint
from support.wrong_tensors import changed_checkpoint, nearer, wrong_tensors
from vllm_fp8rl.refit import refit

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "initializer_range": 0.04,
}
CASES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"head_dim": 64, "moe_intermediate_size": 640},
    "mixtral": {},
    "glm4_moe": {"moe_intermediate_size": 640, "use_qk_norm": True},
    "minimax_m2": {},
}


@pytest.mark.parametrize("kind", CASES)
def test_logprobs_equal_transformers_through_refits(kind: str, tmp_path: Path) -> None:
    paths = {
        name: make_family_checkpoint(tmp_path / name, seed, kind, **SHAPE, **CASES[kind])
        for seed, name in enumerate("ab")
    }
    engine = start_engine(paths["a"], RECIPE)
    try:
        tensors = {name: refit_tensors(path, RECIPE) for name, path in paths.items()}

        def give(name: str) -> None:
            refit(engine.llm, tensors[name].items(), expect_kv_scales=False)

        def expected(name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
            return expected_logprobs(paths[name], recipe, rollout, **options)

        check_through_refits(engine, give, expected)
        give("b")
        rollout = engine.rollout()
        wrong = {
            what: expected_logprobs(
                changed_checkpoint(paths["b"], tmp_path / "wrong", changes), RECIPE, rollout
            )
            for what, changes in wrong_tensors(tensors["b"], tensors["a"]).items()
        }
        assert wrong and not nearer(rollout.logprobs, expected("b", rollout, RECIPE), wrong)
    finally:
        engine.llm.llm_engine.engine_core.shutdown()

"""A Qwen3.5-shaped model on a GPU: gated delta nets, gated attention, experts, refits in graphs.

See ``test_vllm_engine`` for how an engine in BF16 is compared with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")
pytest.importorskip("torchvision", reason="vLLM's Qwen3.5 imports it")
pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers has no Qwen3.5")

from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.gpu_engine import (
    PROMPTS,
    QUICK,
    GpuEngine,
    Rollout,
    check_through_refits,
    expected_logprobs,
    start_engine,
)
from support.tiny import make_qwen35_checkpoint
from support.towers import TEXT_ONLY
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.refit import refit

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "initializer_range": 0.04,
}
# All inside the vision wrapper, as Qwen publishes them: vLLM 0.25.1 does not start the text alone.
# Experts first: vLLM makes the group of expert parallel with the first engine of a process only.
CASES = {
    "experts": (True, Recipe(kv_cache=KVCache(dtype="auto"))),
    "dense": (False, Recipe(kv_cache=KVCache(dtype="auto"))),
    "dense with an FP8 cache": (False, Recipe()),
}


@dataclass(frozen=True)
class Case:
    engine: GpuEngine
    paths: dict[str, Path]
    scales: dict[str, dict[str, float]]
    """KV scales of each checkpoint; empty without an FP8 cache."""

    def give(self, name: str) -> None:
        tensors = load_file(self.paths[name] / "model.safetensors")
        tensors |= {key: torch.tensor([value]) for key, value in self.scales[name].items()}
        refit(self.engine.llm, tensors.items(), expect_kv_scales=bool(self.scales[name]))


@pytest.fixture(scope="module", params=list(CASES))
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    experts, recipe = CASES[request.param]
    root = tmp_path_factory.mktemp("qwen35")
    drop = () if experts else ("moe_intermediate_size", "shared_expert_intermediate_size")
    shape = {key: value for key, value in SHAPE.items() if key not in drop}
    paths = {
        name: make_qwen35_checkpoint(root / name, seed, experts=experts, vision=True, **shape)
        for seed, name in enumerate("ab")
    }
    # On Hopper vLLM would take flashinfer's kernel of delta nets, which compiles itself in a run.
    options = QUICK | TEXT_ONLY | {"gdn_prefill_backend": "triton"}
    engine = start_engine(paths["a"], recipe, **options)
    scales: dict[str, dict[str, float]] = {name: {} for name in paths}
    if recipe.kv_cache.dtype != "auto":
        for name in ("b", "a"):
            tensors = load_file(paths[name] / "model.safetensors")
            refit(engine.llm, tensors.items(), expect_kv_scales=False)
            scales[name] = calibrate_kv_scales(engine.llm, [p + p for p in PROMPTS])
    yield Case(engine, paths, scales)
    engine.llm.llm_engine.engine_core.shutdown()


def test_logprobs_equal_transformers_after_each_refit_and_tokens_come_back(case: Case) -> None:
    def expected(name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
        if recipe is case.engine.recipe:
            options["kv_scales"] = case.scales[name] or None
        return expected_logprobs(case.paths[name], recipe, rollout, **options)

    check_through_refits(case.engine, case.give, expected)

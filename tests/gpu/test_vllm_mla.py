"""A Moonlight-shaped model on a GPU: multi-latent attention, DeepSeek's experts, refits in graphs.

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

from vllm.model_executor.layers.attention import MLAAttention

from fp8rl import Recipe
from support.gpu_engine import (
    PROMPTS,
    GpuEngine,
    Rollout,
    assert_as_close,
    check_through_refits,
    refit_tensors,
    start_engine,
)
from support.hf_reference import load_reference
from support.mla import ALL, RECIPE
from support.tiny import make_mla_checkpoint
from vllm_fp8rl.refit import refit

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 640,
    "initializer_range": 0.04,
}


@dataclass(frozen=True)
class Case:
    engine: GpuEngine
    paths: dict[str, Path]

    @property
    def recipe(self) -> Recipe:
        return self.engine.recipe

    @property
    def attention(self) -> list[Any]:
        return [m for m in self.engine.model.modules() if isinstance(m, MLAAttention)]

    def give(self, name: str) -> None:
        tensors = refit_tensors(self.paths[name], self.recipe)
        refit(self.engine.llm, tensors.items(), expect_kv_scales=False)

    def expected(self, name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
        """Logprobs of a rollout by transformers, nearly all of it decoded.

        Decode multiplies kv_b_proj with what it does not quantize.
        """
        reference = load_reference(self.paths[name], recipe, device="cuda", **options)
        for path, module in reference.model.named_modules():
            if path.endswith("kv_b_proj"):
                module._forward_pre_hooks.clear()
        sequences = [p + t for p, t in zip(PROMPTS, rollout.tokens, strict=True)]
        rows = reference.many(sequences).split([len(sequence) - 1 for sequence in sequences])
        return torch.cat([r[-len(t) :] for r, t in zip(rows, rollout.tokens, strict=True)])

    def assert_as_transformers(self, name: str, rollout: Rollout) -> None:
        expected = self.expected(name, rollout, self.recipe)
        own = self.expected(name, rollout, self.recipe, dtype=torch.bfloat16)
        plain = self.expected(name, rollout, Recipe(rollout=False))
        assert_as_close(name, rollout.logprobs, expected, own, plain)


def checkpoints(root: Path, **changes: Any) -> dict[str, Path]:
    shape = SHAPE | changes
    return {name: make_mla_checkpoint(root / name, seed, **shape) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module", params=[RECIPE, ALL], ids=["kv_b_proj in BF16", "all in FP8"])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    # DeepSeek-V3 has a low rank for queries and groups of experts, Moonlight has neither.
    more: dict[str, Any] = {}
    if request.param is ALL:
        more = {"q_lora_rank": 256, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    paths = checkpoints(tmp_path_factory.mktemp("mla"), **more)
    engine = start_engine(paths["a"], request.param)
    yield Case(engine, paths)
    engine.llm.llm_engine.engine_core.shutdown()


def test_logprobs_equal_transformers_after_each_refit_and_tokens_come_back(case: Case) -> None:
    def parts() -> list[int]:  # vLLM 0.25.1 keeps them as plain attributes
        return [part.data_ptr() for each in case.attention for part in (each.W_UK_T, each.W_UV)]

    mode = case.engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.decode_mode().name == "FULL", mode
    before = parts()
    check_through_refits(case.engine, case.give, case.expected)
    assert parts() == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_transformers_after_a_refit(case: Case) -> None:
    """Heads split over ranks, experts whole on one of them."""
    split = start_engine(
        case.paths["b"],
        case.recipe,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    )
    try:
        tensors = refit_tensors(case.paths["a"], case.recipe)
        refit(split.llm, tensors.items(), expect_kv_scales=False)
        rollout = split.rollout()
    finally:
        split.llm.llm_engine.engine_core.shutdown()
    # Tokens cannot be compared: another order of additions flips codes, and then a choice.
    case.assert_as_transformers("a", rollout)

"""A Moonlight-shaped model on a GPU: multi-latent attention, DeepSeek's experts, refits in graphs.

See ``test_vllm_engine`` for how an engine in BF16 is compared with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from vllm.model_executor.layers.attention import MLAAttention

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.numerics import dequantize_block
from fp8rl.recipe import KVCache
from support.gpu_engine import (
    PROMPTS,
    GpuEngine,
    Rollout,
    assert_as_close,
    check_through_refits,
    refit_tensors,
    start_engine,
)
from support.mla import ALL, RECIPE
from vllm_fp8rl.refit import refit
from vllm_fp8rl.testing.hf_reference import load_reference
from vllm_fp8rl.testing.tiny import make_mla_checkpoint

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
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


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


def test_parts_of_kv_b_proj_and_the_router_follow_a_refit(case: Case) -> None:
    case.give("b")
    case.engine.rollout(tokens=2)
    tensors = refit_tensors(case.paths["b"], case.recipe)
    assert torch.equal(case.engine.model.get_parameter(BIAS).cpu(), tensors[BIAS])
    for number, layer in enumerate(case.attention):
        source = layer.kv_b_proj
        if case.recipe is ALL:
            weight = dequantize_block(source.weight, source.weight_scale_inv, dtype=torch.bfloat16)
        else:
            weight = tensors[f"model.layers.{number}.self_attn.kv_b_proj.weight"].cuda()
        by_head = weight.view(layer.num_heads, -1, layer.kv_lora_rank)
        assert torch.equal(layer.W_UK_T, by_head[:, : layer.qk_nope_head_dim])
        assert torch.equal(layer.W_UV, by_head[:, layer.qk_nope_head_dim :].transpose(1, 2))
    case.give("a")


def test_an_fp8_latent_cache_is_refused(case: Case) -> None:
    """In a process of its own: vLLM has one work space of experts for all engines of a process, and
    the start of another one, even if it is refused, frees what the first one's graphs use."""
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(UnsupportedError, match="absorbed query with one scale"),
    ):
        pool.submit(start_engine, case.paths["a"], Recipe(kv_cache=KVCache())).result()


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

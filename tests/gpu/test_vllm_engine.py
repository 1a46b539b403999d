"""A captured engine with FP8 weights and FP8 KV cache: numerics, refits, live scales.

BF16 rounding before a quantization flips codes, so an engine in BF16 lies as far from an FP32
reference as transformers in BF16 does from transformers in FP32; that floor is measured. What tells
a right engine from a wrong one is the direction of its deviation, see ``slope``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.kv_scales import scale_name
from support.gaps import gap
from support.gpu_engine import (
    LAYERS,
    QUICK,
    GpuEngine,
    Rollout,
    check_through_refits,
    expected_logprobs,
    kv_scales,
    refit_tensors,
    start_engine,
)
from vllm_fp8rl.refit import refit


@pytest.fixture(scope="module")
def started(checkpoints: dict[str, Path]) -> Iterator[GpuEngine]:
    engine = start_engine(checkpoints["a"], Recipe())
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def engine(started: GpuEngine, checkpoints: dict[str, Path]) -> GpuEngine:
    """With the weights and scales of ``a``."""
    give(started, checkpoints["a"])
    return started


def give(engine: GpuEngine, path: Path):
    return refit(engine.llm, refit_tensors(path, engine.recipe).items(), expect_kv_scales=True)


def test_runs_on_deep_gemm_flash_attention_and_full_graphs(engine: GpuEngine) -> None:
    backends = {
        module.quant_method.kernel.backend
        for name, module in engine.model.named_modules()
        if name.endswith("_proj")
    }
    assert backends == {"deep_gemm"}
    attention = engine.model.model.layers[0].self_attn.attn
    assert attention.attn_backend.get_name() == "FLASH_ATTN"
    assert attention.impl.requires_q_scale
    mode = engine.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.decode_mode().name == "FULL", mode


def test_logprobs_equal_transformers_after_each_refit_and_tokens_come_back(
    engine: GpuEngine, checkpoints: dict[str, Path]
) -> None:
    def expected(name: str, rollout: Rollout, recipe: Recipe, **options: Any) -> torch.Tensor:
        path = checkpoints[name]
        if recipe is engine.recipe:
            options["kv_scales"] = kv_scales(path, recipe)
        return expected_logprobs(path, recipe, rollout, **options)

    check_through_refits(engine, lambda name: give(engine, checkpoints[name]), expected, near=0.75)


def test_query_scales_are_required_where_queries_are_quantized(
    engine: GpuEngine, checkpoints: dict[str, Path]
) -> None:
    tensors = refit_tensors(checkpoints["a"], engine.recipe)
    del tensors[scale_name(LAYERS - 1, "q")]
    with pytest.raises(RefitError, match=r"lacks 1 .*q_scale"):
        refit(engine.llm, tensors.items(), expect_kv_scales=True)


def test_an_engine_that_is_not_compiled_rounds_as_the_trainer(
    checkpoints: dict[str, Path],
) -> None:
    """Its SwiGLU, and with ``rope_dtype`` its rotation, in captured graphs."""
    from vllm_fp8rl.kernels.rounding import Float32Rotary, RoundedOnceSiluAndMul

    recipe = Recipe(rope_dtype="float32")
    engine = start_engine(checkpoints["a"], recipe, **QUICK)
    try:
        give(engine, checkpoints["a"])
        modules = dict(engine.model.named_modules())
        ends = ("mlp.act_fn", "self_attn.rotary_emb")
        kinds = [{type(m) for name, m in modules.items() if name.endswith(end)} for end in ends]
        assert kinds == [{RoundedOnceSiluAndMul}, {Float32Rotary}]
        rollout, path = engine.rollout(), checkpoints["a"]
        scales = kv_scales(path, recipe)
        expected = expected_logprobs(path, recipe, rollout, kv_scales=scales)
        own = expected_logprobs(path, recipe, rollout, kv_scales=scales, dtype=torch.bfloat16)
        assert gap(rollout.logprobs, expected).mean < 2.0 * gap(own, expected).mean
    finally:
        engine.llm.llm_engine.engine_core.shutdown()

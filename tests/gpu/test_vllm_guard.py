"""Live KV scales of engines whose decode steps are full CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from support.gpu_engine import (
    QUICK,
    GpuEngine,
    expected_logprobs,
    kv_scales,
    make_checkpoints,
    refit_tensors,
    start_engine,
)
from support.wrong_tensors import slope
from vllm_fp8rl.kv_scales import set_kv_scales
from vllm_fp8rl.refit import refit
from vllm_fp8rl.testing.hf_reference import gap


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", params=["FLASH_ATTN", "TRITON_ATTN"])
def engine(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[GpuEngine]:
    """Started without a checkpoint: it has never had KV scales."""
    started = start_engine(
        checkpoints["a"], Recipe(), load_format="dummy", attention_backend=request.param, **QUICK
    )
    attention = started.model.model.layers[0].self_attn.attn
    assert attention.attn_backend.get_name() == request.param
    mode = started.llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
    assert mode.decode_mode().name == "FULL"
    yield started
    started.llm.llm_engine.engine_core.shutdown()


def test_captured_graphs_see_new_scales(engine: GpuEngine, checkpoints: dict[str, Path]) -> None:
    path, recipe = checkpoints["a"], engine.recipe
    refit(engine.llm, refit_tensors(path, recipe).items(), expect_kv_scales=True)
    fine, tokens = kv_scales(path, recipe), engine.greedy()
    for role in "kv":
        clipping = {n: s / 32 if n.endswith(f"{role}_scale") else s for n, s in fine.items()}
        set_kv_scales(engine.model, clipping)
        engine.llm.reset_prefix_cache()
        rollout = engine.rollout()
        new, old = (expected_logprobs(path, recipe, rollout, kv_scales=s) for s in (clipping, fine))
        assert gap(rollout.logprobs, new).mean < 0.75 * gap(rollout.logprobs, old).mean, role
        assert slope(rollout.logprobs, new, old) > 0.5, role
    set_kv_scales(engine.model, fine)
    engine.llm.reset_prefix_cache()
    assert engine.greedy() == tokens

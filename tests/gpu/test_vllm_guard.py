"""Engines whose decode steps are full CUDA graphs: steps that must not run, and live KV scales."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError
from fp8rl.numerics import quantize_block
from support.gaps import gap, observed_kv_scales
from support.gpu_engine import (
    PROMPTS,
    QUICK,
    GpuEngine,
    expected_logprobs,
    kv_scales,
    refit_tensors,
    start_engine,
)
from support.wrong_tensors import slope
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.kv.scales import kv_scale_state, set_kv_scales
from vllm_fp8rl.refit import RefitSession, drop_requests, refit

DOWN = "model.layers.1.mlp.down_proj.weight"


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


def test_no_step_runs_before_scales_come_or_over_a_mixture(
    engine: GpuEngine, checkpoints: dict[str, Path]
) -> None:
    path, recipe = checkpoints["a"], engine.recipe
    a, b = (refit_tensors(checkpoints[name], recipe) for name in "ab")
    weights = {name: tensor for name, tensor in a.items() if not name.endswith("_scale")}
    refit(engine.llm, weights.items(), expect_kv_scales=False)
    with pytest.raises(ScaleError, match=r"'model\.layers\.0\.self_attn\.[\w.]+_scale' was never"):
        engine.greedy()
    drop_requests(engine.llm)

    prompts = [prompt + prompt for prompt in PROMPTS]
    found = calibrate_kv_scales(engine.llm, prompts)
    assert len(found) == len(kv_scale_state(engine.model)) == 6  # queries are quantized here
    for name, value in observed_kv_scales(path, recipe, prompts, device="cuda").items():
        # BF16, and an FP8 cache before the second layer.
        assert found[name] == pytest.approx(value, rel=0.1), name
    rollout = engine.rollout()
    expected = expected_logprobs(path, recipe, rollout, kv_scales=found)
    own = expected_logprobs(path, recipe, rollout, kv_scales=found, dtype=torch.bfloat16)
    assert gap(rollout.logprobs, expected).mean < 2.0 * gap(own, expected).mean

    refit(engine.llm, a.items(), expect_kv_scales=True)
    tokens = engine.greedy()
    # Past the front door of ``refit``, which would refuse before any step.
    with (
        pytest.raises(KeyboardInterrupt),
        RefitSession(engine.model, expect_kv_scales=False) as session,
    ):
        session.load(list(b.items())[:3])
        with pytest.raises(RefitError, match="a refit is under way"):
            engine.greedy()
        raise KeyboardInterrupt
    drop_requests(engine.llm)
    with pytest.raises(RefitError, match="half-updated"):
        engine.greedy()
    drop_requests(engine.llm)
    refit(engine.llm, a.items(), expect_kv_scales=True)
    assert engine.greedy() == tokens

    codes, scale_inv = quantize_block(a[DOWN])
    engine.model.load_weights([(DOWN, codes)])
    with pytest.raises(RefitError, match="down_proj' received FP8 'weight' without"):
        engine.greedy()
    drop_requests(engine.llm)
    engine.model.load_weights([(f"{DOWN}_scale_inv", scale_inv)])
    engine.llm.reset_prefix_cache()
    assert engine.greedy() == tokens


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

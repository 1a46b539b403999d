"""KV scales calibrated inside a captured engine, against those that transformers observes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from gpu_engine import PROMPTS, expected_logprobs, make_checkpoints, slope, start_engine

from fp8rl import Recipe
from fp8rl.errors import ScaleError
from vllm_fp8rl.calibrate import calibrate_kv_scales
from vllm_fp8rl.kv_cache import kv_scale_state
from vllm_fp8rl.refit import drop_requests
from vllm_fp8rl.testing.hf_reference import gap, observed_kv_scales


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "TRITON_ATTN"])
def test_scales_are_those_of_the_prompts_and_serve(tmp_path: Path, backend: str) -> None:
    path, recipe = make_checkpoints(tmp_path)["a"], Recipe()
    engine = start_engine(path, recipe, attention_backend=backend)
    prompts = [prompt + prompt for prompt in PROMPTS]
    with pytest.raises(ScaleError, match="never loaded"):
        engine.greedy()
    drop_requests(engine.llm)
    found = calibrate_kv_scales(engine.llm, prompts)
    for name, value in observed_kv_scales(path, recipe, prompts).items():
        # BF16, and an FP8 cache before the second layer.
        assert found[name] == pytest.approx(value, rel=0.08), name
    assert len(kv_scale_state(engine.model)) == len(found) == 6  # queries are quantized here
    rollout = engine.rollout()
    expected = expected_logprobs(path, recipe, rollout, kv_scales=found)
    own = expected_logprobs(path, recipe, rollout, kv_scales=found, dtype=torch.bfloat16)
    plain = expected_logprobs(path, Recipe(rollout=False), rollout)
    assert gap(rollout.logprobs, expected).mean < 2.0 * gap(own, expected).mean
    assert slope(rollout.logprobs, expected, plain) > 0.75 * slope(own, expected, plain)
    engine.llm.llm_engine.engine_core.shutdown()

"""A language model inside a vision wrapper: FP8 for it, BF16 for the tower, refits of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from fp8rl import Recipe
from fp8rl.numerics import FP8_DTYPE
from support.engine import Engine, load_tensors, same_bits, same_state
from support.towers import TEXT_ONLY, keep_towers

pytest.importorskip("vllm")
pytest.importorskip("transformers.models.qwen3_vl", reason="transformers has no Qwen3-VL")
from support.gaps import gap, noise_floor, observed_kv_scales
from support.hf_reference import load_reference
from support.teacher_forced import FACTOR, PROMPTS, vllm_logprobs
from support.tiny import make_qwen3_vl_checkpoint
from vllm_fp8rl.compat import installed_version
from vllm_fp8rl.refit import refit


@pytest.mark.skipif(
    Version("0.28") <= Version(installed_version() or "0") < Version("0.30"),
    reason="vLLM 0.28 and 0.29 cannot build Qwen3-VL on a CPU, with or without fp8rl",
)
def test_qwen3_vl(
    tmp_path: Path, other_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_towers(monkeypatch)
    paths = [make_qwen3_vl_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab")]
    engine = other_engine(paths[0], Recipe(), scaled=False, **TEXT_ONLY)
    before = engine.state()
    weights = {name for name, tensor in before.items() if tensor.dtype == FP8_DTYPE}
    assert len(weights) == 2 * 4  # of two layers
    assert all(name.startswith("language_model.model.layers.") for name in weights)

    for path in reversed(paths):
        scales = observed_kv_scales(path, engine.recipe, PROMPTS[:16])
        sent = load_tensors(path)
        wire = sent | {name: torch.tensor([scale]) for name, scale in scales.items()}
        report = refit(engine.llm, wire.items(), expect_kv_scales=True)
        assert (report.kv_scales, report.left_out) == (4, 0)
        state = engine.state()
        towers = [name for name in sent if name.startswith("model.visual.")]
        assert towers
        assert all(same_bits(state[n.removeprefix("model.")], sent[n].float()) for n in towers)
        if path == paths[0]:
            break
        actual = vllm_logprobs(engine)
        expected = load_reference(path, engine.recipe, kv_scales=scales).many(PROMPTS)
        floor = noise_floor(path, engine.recipe, PROMPTS, kv_scales=scales)
        assert gap(actual, expected).within(floor, FACTOR), (gap(actual, expected), floor)
    scaled = {name for name in before if name.endswith(("k_scale", "v_scale"))}
    assert same_state({n: t for n, t in before.items() if n not in scaled}, engine.state())

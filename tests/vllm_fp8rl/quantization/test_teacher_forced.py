"""Teacher-forced logprobs of live vLLM against transformers with the same fake quantization.

The tolerance is the noise between two of transformers' own attention implementations, times
``FACTOR``. vLLM rounds in more places than attention (norms, rotary embedding, order of the
GEMMs), so a correct engine lies above 1: 0.6 to 4.3 over twelve pairs of checkpoint and recipe. One
K scale wrong by 10% in one layer lies at 16 and more, a linear layer left unquantized at 19.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8rl import Recipe
from fp8rl.kv_scales import scale_name
from support.engine import Engine

pytest.importorskip("vllm")
from support.gaps import Gap, gap, noise_floor, observed_kv_scales
from support.hf_reference import load_reference
from support.teacher_forced import FACTOR, PROMPTS, vllm_logprobs
from vllm_fp8rl.kv.scales import kv_scale_state, set_kv_scales


def refit(engine: Engine, path: Path) -> dict[str, float] | None:
    """Weights of a checkpoint and, with an FP8 cache, the scales that its K and V call for."""
    engine.model.load_weights(iter(load_file(path / "model.safetensors").items()))
    scales = None
    if engine.recipe.kv_cache.dtype != "auto":
        scales = observed_kv_scales(path, engine.recipe, PROMPTS[:16])
        engine.model.load_weights((n, torch.tensor([s])) for n, s in scales.items())
    engine.llm.reset_prefix_cache()
    return scales


def floor_of(engine: Engine, path: Path, scales: Mapping[str, float] | None) -> Gap:
    return noise_floor(path, engine.recipe, PROMPTS, kv_scales=scales)


@pytest.fixture
def fp8_engine(engine: Engine, checkpoints: dict[str, Path]) -> Iterator[Engine]:
    """The session's engine; other tests find it with its weights and scales again."""
    before = kv_scale_state(engine.model)
    yield engine
    refit(engine, checkpoints["a"])
    set_kv_scales(engine.model, {scale_name(*key): value for key, value in before.items()})


def test_equals_transformers_after_refits(fp8_engine: Engine, checkpoints: dict[str, Path]) -> None:
    for name in "ba":
        path = checkpoints[name]
        scales = refit(fp8_engine, path)
        actual = vllm_logprobs(fp8_engine)
        expected = load_reference(path, fp8_engine.recipe, kv_scales=scales).many(PROMPTS)
        floor = floor_of(fp8_engine, path, scales)
        assert gap(actual, expected).within(floor, FACTOR), (name, gap(actual, expected), floor)


def test_the_tolerance_catches_wrong_scales_and_wrong_weights(
    fp8_engine: Engine, checkpoints: dict[str, Path]
) -> None:
    path, recipe = checkpoints["a"], fp8_engine.recipe
    scales = refit(fp8_engine, path)
    assert scales is not None
    actual, floor = vllm_logprobs(fp8_engine), floor_of(fp8_engine, path, scales)
    off = {**scales, scale_name(1, "k"): scales[scale_name(1, "k")] * 1.1}
    wrong = {
        "scale 1": load_reference(path, recipe, kv_scales=dict.fromkeys(scales, 1.0)),
        "k_scale of one layer off by 10%": load_reference(path, recipe, kv_scales=off),
        "K and V not quantized": load_reference(path, recipe),
        "one weight not quantized": load_reference(
            path, recipe, kv_scales=scales, unquantized=["model.layers.1.mlp.down_proj"]
        ),
        "weights of b": load_reference(path.parent / "b", recipe, kv_scales=scales),
    }
    for what, reference in wrong.items():
        found = gap(actual, reference.many(PROMPTS))
        assert found.mean > FACTOR * floor.mean, (what, found, floor)
        assert found.flipped > FACTOR * floor.flipped, (what, found, floor)


@pytest.mark.parametrize("kind", ["plain cache", "fp8 cache alone", "pins"])
def test_other_recipes(
    kind: str, checkpoints: dict[str, Path], other_engine, shared_engine
) -> None:
    path = checkpoints["b"]
    if kind == "fp8 cache alone":
        engine = other_engine(checkpoints["a"], Recipe(rollout=False))
    else:
        engine = shared_engine(kind)
    recipe = engine.recipe
    scales = refit(engine, path)
    actual, floor = vllm_logprobs(engine), floor_of(engine, path, scales)
    expected = load_reference(path, recipe, kv_scales=scales).many(PROMPTS)
    assert gap(actual, expected).within(floor, FACTOR), (gap(actual, expected), floor)
    other = load_reference(path, Recipe(), kv_scales=observed_kv_scales(path, recipe, PROMPTS[:8]))
    assert not gap(actual, other.many(PROMPTS)).within(floor, FACTOR)

"""Teacher-forced logprobs of live vLLM against transformers with the same fake quantization.

The tolerance is the noise between two of transformers' own attention implementations, times
``FACTOR``. vLLM rounds in more places than attention (norms, rotary embedding, order of the
GEMMs), so a correct engine lies above 1: 0.6 to 4.3 over twelve pairs of checkpoint and recipe. One
K scale wrong by 10% in one layer lies at 16 and more, a linear layer left unquantized at 19.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.kv_scales import scale_name
from support.engine import Engine, load_tensors
from support.gaps import gap, observed_kv_scales
from support.hf_reference import load_reference
from support.teacher_forced import FACTOR, PROMPTS, near_transformers


def refit(engine: Engine, path: Path) -> dict[str, float] | None:
    """Weights of a checkpoint and, with an FP8 cache, the scales that its K and V call for."""
    engine.model.load_weights(iter(load_tensors(path).items()))
    scales = None
    if engine.recipe.kv_cache.dtype != "auto":
        scales = observed_kv_scales(path, engine.recipe, PROMPTS[:16])
        engine.model.load_weights((n, torch.tensor([s])) for n, s in scales.items())
    engine.llm.reset_prefix_cache()
    return scales


@pytest.mark.usefixtures("restored")
def test_the_tolerance_catches_wrong_scales_and_wrong_weights(engine, checkpoints):
    path, recipe = checkpoints["b"], engine.recipe
    scales = refit(engine, path)
    assert scales is not None
    actual, floor = near_transformers(engine, path, scales)
    off = {**scales, scale_name(1, "k"): scales[scale_name(1, "k")] * 1.1}
    wrong = {
        "scale 1": load_reference(path, recipe, kv_scales=dict.fromkeys(scales, 1.0)),
        "k_scale of one layer off by 10%": load_reference(path, recipe, kv_scales=off),
        "K and V not quantized": load_reference(path, recipe),
        "one weight not quantized": load_reference(
            path, recipe, kv_scales=scales, unquantized=["model.layers.1.mlp.down_proj"]
        ),
        "older weights": load_reference(checkpoints["a"], recipe, kv_scales=scales),
    }
    for what, reference in wrong.items():
        found = gap(actual, reference.many(PROMPTS))
        assert found.mean > FACTOR * floor.mean, (what, found, floor)
        assert found.flipped > FACTOR * floor.flipped, (what, found, floor)


@pytest.mark.parametrize("kind", ["fp8 cache alone", "pins"])
def test_other_recipes(kind, checkpoints, other_engine, shared_engine):
    path = checkpoints["b"]
    if kind == "fp8 cache alone":
        engine = other_engine(checkpoints["a"], Recipe(rollout=False))
    else:
        engine = shared_engine(kind)
    scales = refit(engine, path)
    actual, floor = near_transformers(engine, path, scales)
    other = load_reference(path, Recipe(), kv_scales=scales).many(PROMPTS)
    assert not gap(actual, other).within(floor, FACTOR)

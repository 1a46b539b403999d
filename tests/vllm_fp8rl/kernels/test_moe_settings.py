"""What is set for vLLM's fused MoE kernels."""

from __future__ import annotations

import os

import pytest

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import ActivationFormat
from vllm_fp8rl.kernels.moe_settings import ACTIVATION_SCALES_ENV, set_activation_scales

POW2 = Recipe(activations=ActivationFormat(scale_format="pow2"))


def test_the_recipe_decides_unless_the_environment_has(monkeypatch):
    for recipe, other, value in ((Recipe(), POW2, "0"), (POW2, Recipe(), "1")):
        monkeypatch.delenv(ACTIVATION_SCALES_ENV, raising=False)
        set_activation_scales(recipe, experts=True)
        assert os.environ[ACTIVATION_SCALES_ENV] == value
        set_activation_scales(other, experts=False)  # linear layers are told directly
        assert os.environ[ACTIVATION_SCALES_ENV] == value
        with pytest.raises(UnsupportedError, match=f"{ACTIVATION_SCALES_ENV}={value} contradicts"):
            set_activation_scales(other, experts=True)

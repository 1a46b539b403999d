"""The rule of the advice, case by case as docs/bench.md lists it."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl import Recipe
from fp8rl_bench.advice import advise
from support.bench_reports import KL, SPEEDS, report

BF16 = {"rollout": False, "training": False, "kv_cache": {"dtype": "auto"}}
FP8, INT8, AUTO = (
    {"kv_cache": {"dtype": dtype}} for dtype in ("fp8_e4m3", "int8_per_token_head", "auto")
)
HIGH = dict.fromkeys(("fp8rl-kv", "fp8rl-int8", "fp8rl"), 1.31)
HEALTHY = dict.fromkeys(HIGH, 1.25)  # SmolLM2's, docs/measurements/expect.md
EXACT = {"speeds": {**SPEEDS, "fp8rl-exact": 140.0}, "kl": {**KL, "fp8rl-exact": 0.0}}


@pytest.mark.parametrize(
    ("changes", "recipe", "words"),
    [
        # 0.0224 is 1.24 times 0.018, so all caches are near the best, and FP8's is fastest.
        ({}, FP8, "rollouts run at 1.70 times"),
        ({"kl": {**KL, "fp8rl-kv": 0.0269}}, INT8, "1.65 times"),  # SmolLM2's
        ({"kl": {**KL, "fp8rl-kv": 0.1, "fp8rl-int8": 0.1}}, AUTO, "1.18 times"),
        ({"random": True}, FP8, "Random weights say nothing about KL."),
        ({"speeds": {"bf16": 100.0, "fp8rl-kv": 103.0}}, BF16, "does not pay"),
        ({"layer": (10.0, 10.2)}, FP8, "a training layer at 0.98 times"),
        ({"layer": (10.0, 11.0)}, {"training": False, **FP8}, "a training layer at 0.91 times"),
        # Of two calls the median is the mean: the larger one alone would pay.
        ({"speeds": {"bf16": 100.0, "fp8rl-kv": [101.5, 105.0]}}, BF16, "1.03 times"),
        ({"errors": HEALTHY}, FP8, "within 1.3"),
        ({"errors": HIGH}, FP8, "above 1.3: measure exact too"),
        ({"errors": HIGH, "failed": {"start": "no"}}, BF16, "exact cannot be taken here"),
        ({"errors": HIGH, **EXACT}, {"exact": True}, "take exact at 1.40 times BF16's"),
        (
            {"errors": HIGH, **EXACT, "speeds": {**SPEEDS, "fp8rl-exact": 90.0}},
            BF16,
            "exact is not faster than BF16",
        ),
        ({"errors": HIGH, **EXACT, "kl": KL}, FP8, "exact was not scored; the rows say why"),
        ({"device": "CPU"}, AUTO, "CPU: FP8 is emulated"),
        ({"device": "CPU", "errors": HIGH, **EXACT}, {"exact": True}, "whose KL is 0.0e+00"),
        ({"speeds": {"bf16": 100.0}}, {}, "No advice"),
    ],
)
def test_each_case_has_its_recipe(
    changes: dict[str, Any], recipe: dict[str, Any], words: str
) -> None:
    advice = advise(report(**changes))
    assert advice.recipe == recipe and words in advice.text
    Recipe.from_dict(advice.recipe)


def test_the_trainer_that_is_advised_is_the_one_whose_kl_counts() -> None:
    slow = report(layer=(10.0, 12.0))
    slow["training"]["bf16_trainer"] = {"fp8rl-kv": {"kl_k3": 0.04, "capped_prob_error": 1.05}}
    advice = advise(slow)
    assert advice.recipe["training"] is False and "KL to the trainer 4.0e-02" in advice.text

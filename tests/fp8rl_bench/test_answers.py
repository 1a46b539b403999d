from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fp8rl.errors import UnsupportedError
from fp8rl_bench import rollouts
from fp8rl_bench.answers import PROMPTS, chat_ids, compared
from fp8rl_bench.rollouts import prompts, sender_size, speeds
from fp8rl_bench.variants import VARIANTS, cache_of, engine_arguments, recipe_of


def test_log_probabilities_are_compared_as_in_float64() -> None:
    draw = np.random.default_rng(0)
    sampled = [-draw.random(n).astype(np.float32) for n in (3, 5)]
    other = [row + draw.normal(0, 0.1, len(row)).astype(np.float32) for row in sampled]
    other[0][1] = sampled[0][1]
    other[1][4] -= 3  # one outlier, which the cap bounds
    found = compared([row.tolist() for row in sampled], [row.tolist() for row in other])
    ratio = np.concatenate(other).astype(float) - np.concatenate(sampled).astype(float)
    assert found["tokens"] == 8 and found["equal"] == 1 / 8
    assert found["kl_k3"] == pytest.approx(np.mean(np.exp(ratio) - 1 - ratio), rel=1e-6)
    error = np.exp(abs(ratio))
    assert found["token_mult_prob_error"] == pytest.approx(np.mean(error), rel=1e-6)
    assert found["capped_prob_error"] == pytest.approx(np.mean(error.clip(max=10)), rel=1e-6)
    assert error.max() > 10


class Tokenizer:
    """A token for each character; its template puts 1 before and 2 behind."""

    chat_template: str | None = None
    eos_token_id = 7

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, message: Any, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *(ord(c) for c in message[0]["content"]), 2]}


def test_prompts_have_the_template_of_the_model() -> None:
    tokenizer = Tokenizer()
    assert chat_ids(tokenizer, "ab") == [97, 98] and len(chat_ids(tokenizer, "a" * 900)) == 512
    tokenizer.chat_template = "there is one"
    assert chat_ids(tokenizer, "ab") == [1, 97, 98, 2]
    assert len(set(PROMPTS)) == 128


def test_prompts_of_a_load_are_within_the_vocabulary() -> None:
    made = [prompt["prompt_token_ids"] for prompt in prompts(6, 50, samples=2, words=97)]
    assert made[0] == made[1] != made[2] and max(map(max, made)) < 97


@pytest.mark.parametrize(
    ("calls", "seconds", "done"), [(None, 30, 2), (None, 8, 3), (None, 1, 5), (3, 30, 3), (1, 1, 1)]
)
def test_the_first_engine_fills_some_seconds_and_others_repeat_as_often(
    calls: int | None, seconds: float, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, measured = [0.0], []

    def measure(llm: Any, load: Any, tokens: int, *, words: int) -> float:
        measured.append(tokens)
        now[0] += seconds
        return 7.0

    monkeypatch.setattr(rollouts, "tokens_per_second", measure)
    monkeypatch.setattr(rollouts.time, "perf_counter", lambda: now[0])
    assert speeds(None, (2, 8, 128), 99, calls) == [7.0] * done
    assert measured == [64, *[128] * done]


VOCABULARY, GIB = 622_000_000, 1 << 30  # elements of Qwen3-8B's largest tensor


@pytest.mark.parametrize(
    ("sizes", "free", "size"),
    [
        ([VOCABULARY] * 13, math.inf, 2 * VOCABULARY + (1 << 28)),
        ([1 << 20] * 5, math.inf, 5 << 20),
        ([1 << 24] * 999, 64 * GIB, GIB),
        ([VOCABULARY] * 13, 4 * GIB, GIB),
        ([VOCABULARY] * 13, 2 * GIB, None),
    ],
)
def test_a_sender_takes_half_of_the_free_memory_at_most(
    sizes: list[int], free: float, size: int | None
) -> None:
    if size is not None:
        assert sender_size(sizes, free) == size
        return
    with pytest.raises(UnsupportedError, match=r"needs 2.3 GiB .* has 2.0; give --memory less"):
        sender_size(sizes, free)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_has_an_engine(variant: str) -> None:
    found = engine_arguments(variant)
    assert found.get("kv_cache_dtype", "auto") == cache_of(variant)
    if variant.startswith("fp8rl"):
        recipe = recipe_of(variant, {"pins": {"first": 1}})
        assert recipe.exact == ("exact" in variant) and recipe.pins.first == 1
        assert found["additional_config"]["fp8rl"]["kv_cache"]["dtype"] == cache_of(variant)
    else:
        assert ("hf_overrides" in found) == (variant != "bf16")
        quantized = engine_arguments(variant, trained=True).get("quantization")
        assert quantized == (None if variant == "bf16" else "fp8_per_block")

"""Logprobs of given tokens in a live engine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import torch

from support.engine import Engine
from support.gaps import Gap, expected_and_floor, gap

FACTOR = 8.0
_random = random.Random(5)
# Short prompts: a flipped code only touches positions after it in its own prompt.
PROMPTS = [[_random.randrange(2, 512) for _ in range(12)] for _ in range(96)]


def vllm_logprobs(engine: Engine, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    """Logprobs of every prompt token but the first, in the order of the reference."""
    from vllm import SamplingParams

    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return torch.tensor(
        [
            output.prompt_logprobs[position][prompt[position]].logprob
            for output, prompt in zip(outputs, prompts, strict=True)
            for position in range(1, len(prompt))
        ]
    )


def near_transformers(
    engine: Engine, path: Path, kv_scales: Mapping[str, float] | None = None
) -> tuple[torch.Tensor, Gap]:
    """Require an engine's logprobs to be transformers' but for rounding; return them, and that."""
    actual = vllm_logprobs(engine)
    expected, floor = expected_and_floor(path, engine.recipe, PROMPTS, kv_scales=kv_scales)
    found = gap(actual, expected)
    assert found.within(floor, FACTOR), (path, found, floor)
    return actual, floor

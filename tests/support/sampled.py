"""Answers of a live engine with their logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def sampled(
    llm: Any,
    prompts: Sequence[list[int]],
    counts: Sequence[int],
    *,
    temperature: float = 0.0,
    **options: Any,
) -> list[tuple[list[int], torch.Tensor]]:
    """Sample so many tokens after each prompt; return all tokens, and the logprobs of the last."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0
        )
        for n in counts
    ]
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for output in llm.generate(inputs, params, use_tqdm=False, **options):
        (answer,) = output.outputs
        chosen = zip(answer.logprobs, answer.token_ids, strict=True)
        logprobs = torch.tensor([of[token].logprob for of, token in chosen])
        found.append(([*output.prompt_token_ids, *answer.token_ids], logprobs))
    return found

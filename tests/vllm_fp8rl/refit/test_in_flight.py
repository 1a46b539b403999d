"""Weights that change under a request in flight: the next token of the naive way is wrong.

What has been generated lies in the KV cache as keys and values of the old weights. ``refit_async``
makes them anew (test_asynchronous.py); ``refit`` takes an idle engine only (test_interrupts.py).
"""

from __future__ import annotations

import pytest
import torch

from support.engine import SCALES, Engine
from vllm_fp8rl.refit import drop_requests, refit

PROMPTS = [[(11 * i * j) % 500 + 5 for i in range(60)] for j in range(1, 9)]
pytestmark = pytest.mark.usefixtures("restored")


def begun(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, list[int]]:
    """Requests in flight: the first tokens of each, by its number in the engine."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        engine.llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)
    said: dict[str, list[int]] = {}
    while len(said) < len(prompts) or min(map(len, said.values())) < tokens:
        said |= one_step(engine)
    return said


def one_step(engine: Engine) -> dict[str, list[int]]:
    outputs = engine.llm.llm_engine.step()
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs}


def test_the_next_token_over_old_keys_is_not_that_of_the_new_weights(
    engine: Engine, b: dict[str, torch.Tensor]
) -> None:
    said = begun(engine, PROMPTS, 4)
    engine.model.load_weights((b | SCALES).items())  # the naive way
    naive = {name: tokens[len(said[name])] for name, tokens in one_step(engine).items()}
    drop_requests(engine.llm)
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    right = engine.greedy([p + said[f"{n}"] for n, p in enumerate(PROMPTS)], 1)
    wrong = [n for n in range(len(PROMPTS)) if naive[f"{n}"] != right[n][0]]
    assert len(wrong) >= len(PROMPTS) // 2

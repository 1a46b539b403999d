"""Requests of an in-process engine, stopped in the middle, and refits between two steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from vllm_fp8rl.refit import RefitSession

PROMPTS = [[(11 * i * j) % 500 + 5 for i in range(60)] for j in range(1, 9)]
LENGTH = 12


class Said(NamedTuple):
    """What a request has answered so far."""

    tokens: list[int]
    logprobs: list[float]


def begin(engine: Any, prompts: list[list[int]], tokens: int = LENGTH, *, first: int = 0) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    for number, prompt in enumerate(prompts, first):
        engine.llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)


def one_step(engine: Any) -> list[Said]:
    answers = {int(each.request_id): each.outputs[0] for each in engine.llm.llm_engine.step()}
    return [
        Said(list(answer.token_ids), [next(iter(at.values())).logprob for at in answer.logprobs])
        for _, answer in sorted(answers.items())
    ]


def in_flight(engine: Any, tokens: int = 4) -> list[Said]:
    """Requests that have given their first tokens and have not ended."""
    engine.llm.reset_prefix_cache()
    begin(engine, PROMPTS)
    said: list[Said] = []
    while len(said) < len(PROMPTS) or min(len(each.tokens) for each in said) < tokens:
        said = one_step(engine)
    return said


def ended(engine: Any) -> list[Said]:
    said: list[Said] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        said = one_step(engine) or said
    return said


def put(engine: Any, tensors: dict[str, torch.Tensor]) -> None:
    """A refit as a worker of NeMo RL makes it, between two steps of the engine."""
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        session.load(tensors.items())


def recompute(engine: Any) -> None:
    """Make running requests compute their keys and values again."""
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def last(said: list[Said]) -> torch.Tensor:
    return torch.tensor([each.logprobs[-1] for each in said])


def preemptions(engine: Any) -> int:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    return max(request.num_preemptions for request in scheduler.requests.values())

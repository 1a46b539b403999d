"""Weights and KV scales that change under requests in flight.

What has been generated lies in the KV cache as keys and values of the old weights, in codes of the
scales of that time. As long as no scale changes, requests can go on with them; with new scales the
codes stand for other values. ``refit_async`` (test_asynchronous.py) and the workers of NeMo RL
(tests/nemo_rl_ext/workers/test_in_flight.py) do by themselves what is done by hand here;
``refit`` takes an idle engine only (test_at_once.py).
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from vllm import SamplingParams

from fp8rl.errors import RefitError
from support.engine import SCALES, Engine
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import RefitSession, drop_requests, refit

PROMPTS = [[(11 * i * j) % 500 + 5 for i in range(60)] for j in range(1, 9)]
LENGTH = 12
GROWN = {name: scale * 4 for name, scale in SCALES.items()}
Weights = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("restored")


class Said(NamedTuple):
    """What a request has answered so far."""

    tokens: list[int]
    logprobs: list[float]


def begin(
    engine: Engine, prompts: list[list[int]], tokens: int = LENGTH, *, first: int = 0
) -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    for number, prompt in enumerate(prompts, first):
        engine.llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)


def one_step(engine: Engine) -> list[Said]:
    answers = {int(each.request_id): each.outputs[0] for each in engine.llm.llm_engine.step()}
    return [
        Said(list(answer.token_ids), [next(iter(at.values())).logprob for at in answer.logprobs])
        for _, answer in sorted(answers.items())
    ]


def in_flight(engine: Engine, tokens: int = 4) -> list[Said]:
    """Requests that have given their first tokens and have not ended."""
    engine.llm.reset_prefix_cache()
    begin(engine, PROMPTS)
    said: list[Said] = []
    while len(said) < len(PROMPTS) or min(len(each.tokens) for each in said) < tokens:
        said = one_step(engine)
    return said


def ended(engine: Engine) -> list[Said]:
    said: list[Said] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        said = one_step(engine) or said
    return said


def put(engine: Engine, tensors: Weights) -> None:
    """A refit as a worker of NeMo RL makes it, between two steps of the engine."""
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        session.load(tensors.items())


def recompute(engine: Engine) -> None:
    """Make running requests compute their keys and values again."""
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def last(said: list[Said]) -> torch.Tensor:
    return torch.tensor([each.logprobs[-1] for each in said])


def preemptions(engine: Engine) -> int:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    return max(request.num_preemptions for request in scheduler.requests.values())


def next_logprobs(engine: Engine, tensors: Weights, said: list[Said]) -> torch.Tensor:
    """Logprobs of the next tokens, of an engine that has never had other weights or scales."""
    drop_requests(engine.llm)
    refit(engine.llm, tensors.items(), expect_kv_scales=True)
    begin(engine, [p + each.tokens for p, each in zip(PROMPTS, said, strict=True)], 1)
    return last(one_step(engine))


def test_the_next_token_over_old_keys_is_not_that_of_the_new_weights(
    engine: Engine, b: Weights
) -> None:
    said = in_flight(engine)
    engine.model.load_weights((b | SCALES).items())  # the naive way
    naive = [each.tokens[-1] for each in one_step(engine)]
    drop_requests(engine.llm)
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    right = engine.greedy([p + each.tokens for p, each in zip(PROMPTS, said, strict=True)], 1)
    wrong = [n for n in range(len(PROMPTS)) if naive[n] != right[n][0]]
    assert len(wrong) >= len(PROMPTS) // 2


def test_requests_go_on_where_no_scale_has_changed(engine: Engine, a: Weights) -> None:
    in_flight(engine)
    undisturbed = ended(engine)
    said = in_flight(engine)
    epoch = state_of(engine.model).guard.scale_epoch
    put(engine, a | SCALES)
    assert state_of(engine.model).guard.scale_epoch == epoch
    assert preemptions(engine) == 0
    rest = ended(engine)
    assert rest == undisturbed
    assert len(rest[0].tokens) == LENGTH > len(said[0].tokens)


def test_old_codes_are_read_as_they_were_written_after_new_weights(
    engine: Engine, a: Weights, b: Weights
) -> None:
    in_flight(engine)
    engine.model.load_weights(b.items())  # weights alone: attention is left as it was
    over_old_codes = ended(engine)
    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    in_flight(engine)
    put(engine, b | SCALES)
    assert ended(engine) == over_old_codes


def test_where_a_scale_grows_requests_compute_their_keys_again(engine: Engine, b: Weights) -> None:
    said = in_flight(engine)
    guard = state_of(engine.model).guard
    epoch = guard.scale_epoch
    put(engine, b | GROWN)
    assert (guard.scale_epoch, guard.cache_outdated) == (epoch + 1, True)
    recompute(engine)
    assert preemptions(engine) == 1
    assert not guard.cache_outdated
    found = last(one_step(engine))
    assert torch.allclose(found, next_logprobs(engine, b | GROWN, said), rtol=0, atol=1e-5)


def test_scales_of_queries_leave_cached_codes_as_they_are(engine: Engine, a: Weights) -> None:
    said = in_flight(engine)
    put(engine, a | SCALES | {"model.layers.1.self_attn.attn.q_scale": torch.tensor([0.5])})
    assert len(one_step(engine)[0].tokens) == len(said[0].tokens) + 1


def test_old_codes_with_new_scales_are_wrong_and_refused(
    engine: Engine, a: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights stay, so that nothing but the scales is different."""
    said = in_flight(engine)
    with monkeypatch.context() as without_the_guard:
        without_the_guard.setattr(RefitGuard, "begin_scale_epoch", lambda guard: None)
        put(engine, a | GROWN)
        naive = last(one_step(engine))
    right = next_logprobs(engine, a | GROWN, said)
    wrong = (naive - right).abs()

    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    assert in_flight(engine) == said
    put(engine, a | GROWN)
    with pytest.raises(RefitError, match=r"older KV scales \(epoch \d+; .*reset_running_requests"):
        one_step(engine)
    drop_requests(engine.llm)

    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    assert in_flight(engine) == said
    put(engine, a | GROWN)
    recompute(engine)
    recomputed = (last(one_step(engine)) - right).abs()
    assert recomputed.max() < 1e-5
    assert wrong.mean() > 0.05, "the naive way would have sufficed"

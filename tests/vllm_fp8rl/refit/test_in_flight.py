"""Weights and KV scales that change under requests in flight.

What has been generated lies in the KV cache as keys and values of the old weights, in codes of the
scales of that time. As long as no scale changes, requests can go on with them; with new scales the
codes stand for other values. What ``refit_async`` does about it: sender/test_asynchronous.py.
"""

from __future__ import annotations

import pytest
import torch
from vllm import SamplingParams

from fp8rl.errors import RefitError
from support.engine import SCALES, Engine
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import RefitSession, drop_requests, refit

PROMPTS = [[(11 * i * j) % 500 + 5 for i in range(60)] for j in range(1, 9)]
GROWN = {name: scale * 4 for name, scale in SCALES.items()}
Weights = dict[str, torch.Tensor]
Said = list[tuple[list[int], float]]
"""Of each request: its tokens so far, and the logprob of the last one."""
pytestmark = pytest.mark.usefixtures("restored")


def begin(engine: Engine, prompts: list[list[int]], tokens: int) -> None:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0
    )
    for number, prompt in enumerate(prompts):
        engine.llm.llm_engine.add_request(f"{number}", {"prompt_token_ids": prompt}, sampling)


def one_step(engine: Engine) -> Said:
    answers = {int(each.request_id): each.outputs[0] for each in engine.llm.llm_engine.step()}
    return [
        (list(answer.token_ids), next(iter(answer.logprobs[-1].values())).logprob)
        for _, answer in sorted(answers.items())
    ]


def in_flight(engine: Engine) -> Said:
    """Requests that have given their first tokens and have not ended."""
    engine.llm.reset_prefix_cache()
    begin(engine, PROMPTS, 12)
    said: Said = []
    while len(said) < len(PROMPTS) or min(len(tokens) for tokens, _ in said) < 4:
        said = one_step(engine)
    return said


def put(engine: Engine, tensors: Weights) -> int:
    """A refit as a worker of NeMo RL makes it, between two steps; by how much the epoch grows."""
    guard = state_of(engine.model).guard
    epoch = guard.scale_epoch
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        session.load(tensors.items())
    return guard.scale_epoch - epoch


def recompute(engine: Engine) -> None:
    """Make running requests compute their keys and values again."""
    core = engine.llm.llm_engine.engine_core.engine_core
    assert core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert not state_of(engine.model).guard.cache_outdated


def last(said: Said) -> torch.Tensor:
    return torch.tensor([logprob for _, logprob in said])


def next_of_a_fresh_engine(engine: Engine, tensors: Weights, said: Said) -> Said:
    """What an engine that has never had other weights or scales says next."""
    drop_requests(engine.llm)
    refit(engine.llm, tensors.items(), expect_kv_scales=True)
    begin(engine, [p + tokens for p, (tokens, _) in zip(PROMPTS, said, strict=True)], 1)
    return one_step(engine)


def test_the_next_token_over_old_keys_is_not_that_of_the_new_weights(engine, b):
    said = in_flight(engine)
    engine.model.load_weights((b | SCALES).items())  # the naive way
    naive = one_step(engine)
    right = next_of_a_fresh_engine(engine, b | SCALES, said)
    wrong = [n for n in range(len(PROMPTS)) if naive[n][0][-1] != right[n][0][-1]]
    assert len(wrong) >= len(PROMPTS) // 2


@pytest.mark.parametrize(
    "change", [{}, {"model.layers.1.self_attn.attn.q_scale": torch.tensor(0.5)}]
)
def test_requests_go_on_where_no_scale_of_cached_codes_has_changed(engine, a, change):
    said = in_flight(engine)
    assert put(engine, a | SCALES | change) == 0
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    assert not any(request.num_preemptions for request in scheduler.requests.values())
    assert len(one_step(engine)[0][0]) == len(said[0][0]) + 1


def test_where_a_scale_grows_old_codes_are_refused_until_keys_are_computed_again(
    engine, a, monkeypatch
):
    """The weights stay, so that nothing but the scales is different."""
    said = in_flight(engine)
    with monkeypatch.context() as without_the_guard:
        without_the_guard.setattr(RefitGuard, "begin_scale_epoch", lambda guard: None)
        put(engine, a | GROWN)
        naive = last(one_step(engine))
    right = last(next_of_a_fresh_engine(engine, a | GROWN, said))
    assert (naive - right).abs().mean() > 0.05, "the naive way would have sufficed"

    for recomputed in (False, True):
        refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
        assert in_flight(engine) == said
        assert put(engine, a | GROWN) == 1
        if recomputed:
            recompute(engine)
            assert (last(one_step(engine)) - right).abs().max() < 1e-5
            return
        with pytest.raises(RefitError, match=r"older KV scales \(epoch \d+; .*running_requests"):
            one_step(engine)
        drop_requests(engine.llm)

"""Weights and KV scales that change under requests in flight.

What has been generated lies in the KV cache as keys and values of the old weights, in codes of the
scales of that time. As long as no scale changes, requests can go on with them; with new scales the
codes stand for other values. ``refit_async`` (test_asynchronous.py) and the workers of NeMo RL
(tests/nemo_rl_ext/workers/test_in_flight.py) do by themselves what is done by hand here;
``refit`` takes an idle engine only (test_at_once.py).
"""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import SCALES, Engine
from support.in_flight import (
    LENGTH,
    PROMPTS,
    Said,
    begin,
    ended,
    in_flight,
    last,
    one_step,
    preemptions,
    put,
    recompute,
)
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import drop_requests, refit

GROWN = {name: scale * 4 for name, scale in SCALES.items()}
Weights = dict[str, torch.Tensor]
pytestmark = pytest.mark.usefixtures("restored")


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

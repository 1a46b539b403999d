"""Log-probabilities of a rollout, of an ``LLM``'s outputs without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from nemo_rl_ext.workers.rollout_outputs import RequestsFlatLogprobs, SampledLogprobs

LENGTHS = [3, 1, 2]
"""Tokens of each answer."""


def output(tokens: list[int], logprobs: Any) -> RequestOutput:
    completion = CompletionOutput(0, "", tokens, None, logprobs, finish_reason="length")
    return RequestOutput("0", None, [1, 2], None, [completion], finished=True)


def entries(tokens: Sequence[int | None]) -> FlatLogprobs:
    """Log-probabilities as vLLM gives them, or none; the most probable token is another one."""
    made = FlatLogprobs()
    for place, token in enumerate(tokens):
        if token is None:
            made.append(None)
            continue
        made.append({token: Logprob(-0.1 * token - place, 2, None), 999: Logprob(-0.01, 1, None)})
    return made


class Llm:
    """Stands for vLLM's ``LLM``."""

    def __init__(self, outputs: list[RequestOutput]) -> None:
        self.outputs, self.asked = outputs, None

    def generate(self, prompts: object, **options: object) -> list[RequestOutput]:
        self.asked = (prompts, options)
        return self.outputs


def test_values_come_behind_their_prompts_and_nowhere_else() -> None:
    tokens = [[7 * i + j for j in range(length)] for i, length in enumerate(LENGTHS)]
    llm = Llm([output(row, entries(row)) for row in tokens])
    kept = SampledLogprobs(llm)
    outputs = kept.generate("prompts", use_tqdm=False)
    assert llm.asked == ("prompts", {"use_tqdm": False})
    assert [list(o.outputs[0].token_ids) for o in outputs] == tokens
    assert not any(o.outputs[0].logprobs for o in outputs)
    written, prompts = torch.zeros(3, 9), [4, 6, 2]
    kept.write(written, torch.tensor(prompts))
    expected = torch.zeros(3, 9)
    for i, row in enumerate(tokens):
        for j, token in enumerate(row):
            expected[i, prompts[i] + j] = -0.1 * token - j
    assert torch.equal(written, expected)
    assert kept.outputs is llm.outputs, "the engine is reached through it"


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(None, id="none"),
        pytest.param(entries([5, 6]), id="too few"),
        pytest.param(entries([5, 6, 8]), id="of another token"),
        pytest.param(entries([5, 6, 6, 8]), id="too many"),
        pytest.param(entries([5, 6, None]), id="none of the last token"),
        pytest.param(list(entries([5, 6, 6])), id="not flat"),
    ],
)
def test_tokens_without_a_logprob_are_refused(given: Any) -> None:
    """Upstream leaves 0 for them, which is a probability of 1."""
    kept = SampledLogprobs(Llm([output([5, 6, 6], given)]))
    with pytest.raises(RuntimeError, match="for 3 sampled tokens"):
        kept.generate("prompts")


def test_values_of_another_source_are_not_written_over() -> None:
    kept = SampledLogprobs(Llm([output([5], entries([5]))]))
    kept.generate("prompts")
    with pytest.raises(RuntimeError, match="does not get from vLLM's outputs"):
        kept.write(torch.full((1, 3), -1.0), torch.tensor([2]))


class Upstream:
    """Stands for NeMo RL's worker."""

    def _build_sampling_params(self, **options: Any) -> SamplingParams:
        return SamplingParams(logprobs=0, **options)


def test_requests_ask_for_flat_lists() -> None:
    class Worker(RequestsFlatLogprobs, Upstream):
        pass

    params = Worker()._build_sampling_params(max_tokens=7)
    assert params.flat_logprobs and params.max_tokens == 7

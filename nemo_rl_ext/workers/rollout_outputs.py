"""What a synchronous vLLM worker of NeMo RL does with a rollout's outputs on the host.

Each sampled token's log-probability is a dict and an object of vLLM's, which upstream's
``generate`` copies into a tensor one by one: 6 µs each, 1.65 s for 256 answers of 1,024 tokens
on one core, in which the GPU waits (docs/measurements/nemo_rl.md, "The rollout worker alone").
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import wrapt


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let Python's garbage collector wait until the block ends.

    Collections look at all log-probabilities of a rollout again and again, free next to nothing of
    it, and may let the GPU wait.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class SampledLogprobs(wrapt.ObjectProxy):
    """An ``LLM`` whose ``generate`` keeps the log-probabilities of sampled tokens to itself.

    Upstream finds none in the outputs and leaves zeros in its result, which :meth:`write` fills.

    Args:
        llm: a synchronous engine, asked for the log-probability of each sampled token.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        # wrapt stores attributes with this prefix in the proxy.
        self._self_kept: list[list[float]] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``LLM.generate``; the first completion of each output has no ``logprobs`` any more.

        Raises:
            RuntimeError: a sampled token has no log-probability.
        """
        outputs = self.__wrapped__.generate(*args, **kwargs)
        self._self_kept = [_taken(output.outputs[0]) for output in outputs]
        return outputs

    def write(self, logprobs: torch.Tensor, prompt_lengths: torch.Tensor) -> None:
        """Write what :meth:`generate` kept behind each prompt, in place.

        Args:
            logprobs: of upstream's result, ``[sequences, tokens]``, zeros.
            prompt_lengths: tokens of each prompt, ``[sequences]``.

        Raises:
            RuntimeError: they are no zeros, so upstream had them from elsewhere.
        """
        if logprobs.any():
            raise RuntimeError(
                "NeMo RL's worker has written log-probabilities that it does not get from vLLM's "
                "outputs; this version of it is not served (docs/upgrading_nemo_rl.md)."
            )
        for row, start, values in zip(
            logprobs, prompt_lengths.tolist(), self._self_kept, strict=True
        ):
            row[start : start + len(values)] = torch.tensor(values, dtype=row.dtype)


def _taken(completion: Any) -> list[float]:
    """Take the log-probabilities of a completion's tokens out of it."""
    tokens, entries = completion.token_ids, completion.logprobs or []
    try:
        values = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(
            f"vLLM gave log-probabilities for {len(entries)} of {len(tokens)} sampled tokens, or "
            f"for others ({type(error).__name__}: {error}); a step would train on wrong ones."
        ) from error
    completion.logprobs = None
    return values

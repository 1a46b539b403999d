"""What a vLLM worker of NeMo RL does with a rollout's log-probabilities on the host.

vLLM makes a dict and an object for the log-probability of each sampled token, which Python's
garbage collector then looks at again and again: 0.4 s of the 10 that the host spends on 256 answers
of 1,024 tokens. Upstream's ``generate`` copies them into a tensor one by one: 6 µs each, 1.65 s for
as many on one core, in which the GPU waits (``docs/measurements/workers.md``).
"""

from __future__ import annotations

from typing import Any

import torch
import wrapt


class RequestsFlatLogprobs:
    """Mixin for NeMo RL's vLLM workers, whose rollouts get log-probabilities in flat lists.

    Such a ``vllm.logprobs.FlatLogprobs`` has a few lists for each request. It still gives a dict
    for each token to who asks for one, as upstream's asynchronous worker does.
    """

    def _build_sampling_params(self, **options: Any) -> Any:
        """Upstream's parameters of one request, with ``flat_logprobs``."""
        params = super()._build_sampling_params(**options)  # type: ignore[misc]
        params.flat_logprobs = True
        return params


class SampledLogprobs(wrapt.ObjectProxy):
    """An ``LLM`` whose ``generate`` keeps the log-probabilities of sampled tokens to itself.

    Upstream finds none in the outputs and leaves zeros in its result, which :meth:`write` fills.
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
    tokens, entries = list(completion.token_ids), completion.logprobs
    # The sampled token's is the first one at each position.
    first, ends = getattr(entries, "start_indices", ()), getattr(entries, "end_indices", ())
    complete = all(start < end for start, end in zip(first, ends, strict=True))
    if not complete or tokens != [entries.token_ids[place] for place in first]:
        raise RuntimeError(
            f"vLLM gave flat log-probabilities at {len(first)} positions for {len(tokens)} sampled "
            "tokens, or none at one of them, or of other tokens; a step would train on wrong ones."
        )
    values = [entries.logprobs[place] for place in first]
    completion.logprobs = None
    return values

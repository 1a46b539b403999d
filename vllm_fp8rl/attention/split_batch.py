"""Which requests of a step decode and which are prompts, known on the host without a wait."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

_Metadata = TypeVar("_Metadata")


@dataclass(frozen=True)
class Prompts:
    """Neighbouring requests of a batch whose keys and values are dequantized together."""

    requests: slice
    tokens: slice
    """Their queries in the batch."""
    query_starts: torch.Tensor
    """int32 ``[requests + 1]``, counted from the first of ``tokens``."""
    key_starts: torch.Tensor
    """int32 ``[requests + 1]``, in the copy of their keys."""
    keys: int
    """Number of keys of all of them at most, earlier chunks and cached prefixes included."""
    longest_query: int
    longest: int
    """Most keys of one of them at most."""


def split_batch(batch: CommonAttentionMetadata, limit: int) -> tuple[int, list[Prompts]] | None:
    """Split a batch into decodes and prompts.

    The decodes are the requests of one token before the first one of several; vLLM moves them there
    (``reorder_batch_threshold``). A request of one token behind a prompt counts as a prompt, which
    is right in any order.

    Args:
        batch: the batch, with or without requests of no tokens at its end.
        limit: most keys of a group of prompts; a request with more is a group of its own.

    Returns:
        the number of decodes; the prompts, in groups. None if the host does not know how many keys
        each request has at most, as with chunked local attention before vLLM 0.30.
    """
    bounds = batch.seq_lens_cpu_upper_bound
    if bounds is None or len(bounds) != batch.num_reqs:
        return None
    lengths = bounds.tolist()
    starts = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
    counts = [end - start for start, end in pairwise(starts)]
    while counts and counts[-1] == 0:  # padding
        counts.pop()
    decodes = next((n for n, count in enumerate(counts) if count != 1), len(counts))
    prompts, first = [], decodes
    while first < len(counts):
        totals = list(accumulate(lengths[first : len(counts)]))
        size = max(1, sum(total <= limit for total in totals))
        last = first + size
        query_starts = batch.query_start_loc[first : last + 1] - starts[first]
        key_starts = torch.zeros_like(query_starts)
        torch.cumsum(batch.seq_lens[first:last], 0, dtype=torch.int32, out=key_starts[1:])
        prompts.append(
            Prompts(
                slice(first, last),
                slice(starts[first], starts[last]),
                query_starts,
                key_starts,
                totals[size - 1],
                max(counts[first:last]),
                max(lengths[first:last]),
            )
        )
        first = last
    return decodes, prompts


def extended(kind: type[_Metadata], stock: Any, **more: Any) -> _Metadata:
    """Return vLLM's metadata ``stock`` as a dataclass derived from its own, with more fields."""
    return kind(**{f.name: getattr(stock, f.name) for f in fields(stock)}, **more)


def most_keys(engine: VllmConfig) -> int:
    """Return how many keys prompts may have that are copied together."""
    return max(engine.scheduler_config.max_num_batched_tokens, engine.model_config.max_model_len)

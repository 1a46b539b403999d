"""How batches over an FP8 cache are split; torch stands in for kernels (support.mixed_batch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8rl.errors import UnsupportedError
from support.mixed_batch import BATCHES, Batch, load_flash
from vllm_fp8rl.attention.split_batch import split_batch


@pytest.fixture(scope="module")
def flash() -> Iterator[Any]:
    with load_flash() as module:
        yield module


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("layout", "limit", "page", "padding"),
    [("NHD", 1, 16, 0), ("HND", 100, 48, 2), ("packed", 512, 16, 0)],
)
def test_every_batch_has_the_attention_of_its_requests(
    flash, requests, layout, limit, page, padding
):
    batch = Batch(requests, size=64, layout=layout, limit=limit, page=page, padding=padding)
    assert batch.errors(batch.attend(flash)).max() < 0.005


def test_memory_behind_the_copy_does_not_count(flash, monkeypatch):
    """The host may know more keys than there are, so that the copy has rows without a value."""
    empty = torch.empty

    def nan(*shape: Any, **options: Any) -> torch.Tensor:
        return empty(*shape, **options).fill_(float("nan"))

    monkeypatch.setattr(torch, "empty", nan)
    for limit in (1, 512):
        batch = Batch(BATCHES["cached prefixes"], size=64, limit=limit, slack=3)
        assert batch.errors(batch.attend(flash)).max() < 0.005


def split(requests, limit: int = 512, **changes: Any):
    batch = Batch(requests, size=64)
    for name, value in changes.items():
        setattr(batch.common, name, value)
    return split_batch(batch.common, limit)


def test_prompts_are_copied_in_groups_of_at_most_so_many_keys():
    _, groups = split([(9, 1), (100, 20), (0, 300), (0, 60), (600, 2), (0, 5)], limit=400)
    found = [(g.requests.start, g.requests.stop, g.keys, g.longest) for g in groups]
    assert found == [(1, 2, 120, 120), (2, 4, 360, 300), (4, 5, 602, 602), (5, 6, 5, 5)]


def test_without_lengths_on_the_host_a_batch_is_not_split():
    bounds = Batch(BATCHES["prompts"]).common.seq_lens_cpu_upper_bound
    for known in (None, bounds[:-1]):
        assert split(BATCHES["prompts"], seq_lens_cpu_upper_bound=known) is None


def test_an_exact_engine_never_attends_with_queries_in_fp8(flash):
    batch = Batch(BATCHES["decodes and prompts"], size=64)
    with pytest.raises(UnsupportedError, match="exact computes decodes and prompts apart, and a"):
        batch.attend(flash, splits=False, exact=True)

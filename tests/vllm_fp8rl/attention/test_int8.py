"""Batches over an INT8 cache; torch stands in for a GPU's kernels (support.mixed_batch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionType

from fp8rl.errors import UnsupportedError
from support.mixed_batch import BATCHES, CLOSE, Int8Batch, load_int8
from vllm_fp8rl.attention.pages.int8_layout import int8_pages


@pytest.fixture(scope="module")
def int8() -> Iterator[Any]:
    with load_int8() as module:
        yield module


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("layout", "page", "limit"),
    [("NHD", 16, 1), ("NHD", 16, 512), ("packed", 16, 512), ("NHD", 528, 512)],
)
def test_every_batch_has_the_attention_of_its_requests(int8, requests, layout, page, limit):
    """A page of 528 tokens is one of a hybrid model, no multiple of the kernels' tiles."""
    batch = Int8Batch(requests, size=64, layout=layout, page=page, limit=limit)
    assert batch.errors(batch.attend(int8)).max() < CLOSE


def test_lengths_that_only_the_gpu_knows(int8):
    batch = Int8Batch(BATCHES["decodes and prompts"], size=64)
    batch.common.seq_lens_cpu_upper_bound = None
    assert batch.errors(batch.attend(int8)).max() < CLOSE


def test_a_batch_that_is_not_causal_is_refused(int8):
    batch = Int8Batch(BATCHES["prompts"], size=64)
    batch.common.causal = False
    with pytest.raises(UnsupportedError, match=r"not causal.*kv_cache\.dtype to auto"):
        batch.attend(int8)


LAYERS: dict[str, tuple[Any, Any]] = {
    "kv_cache_dtype": ("int8_per_token_head", "auto"),
    "attn_type": (AttentionType.DECODER, "encoder_only"),
    "head_size": (128, 80),
    "sliding_window": ((-1, -1), (127, 0)),
    "logits_soft_cap": (0, 30.0),
    "alibi_slopes": (None, [0.5]),
    "sinks": (None, object()),
    "chunk_lookback": (-1, 1),
    "dcp_world_size": (1, 2),
}
"""What a layer served has, and what another one has, which goes to vLLM's own kernel."""


@pytest.mark.parametrize("key", [None, *LAYERS])
def test_layers_that_are_served(int8, key):
    impl = object.__new__(int8.Fp8RLTritonImpl)
    for name, pair in LAYERS.items():
        setattr(impl, name, pair[name == key])
    assert impl._served() is (key is None)


def empty() -> torch.Tensor:
    """Return a cache of vLLM 0.25.1, 5 pages of 16 tokens, each byte -1."""
    return torch.full((5, 2, 16, 2, 64 + 4), -1, dtype=torch.int8)


def test_views_cover_each_byte_of_a_page_once():
    cache = empty()
    for view in int8_pages(cache, 2, 64):
        view.view(torch.uint8).add_(1)
    assert (cache == 0).all()


def test_pages_in_another_order_of_bytes_are_refused():
    apart = torch.zeros(5, 2, 16, 2, 64 + 8, dtype=torch.int8)[..., : 64 + 4]
    for cache in (empty()[..., :64], apart):
        with pytest.raises(UnsupportedError, match=r"in one piece.*kv_cache\.dtype to auto"):
            int8_pages(cache, 2, 64)

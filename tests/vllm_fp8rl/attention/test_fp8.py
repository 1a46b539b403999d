"""How batches over an FP8 cache are split; torch stands in for kernels (support.mixed_batch)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.errors import UnsupportedError
from support.mixed_batch import BATCHES, Batch, load_flash
from vllm_fp8rl.attention.exact import ExactAttention
from vllm_fp8rl.attention.split_batch import split_batch
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.quantization.kv_cache import Fp8RLKVCacheMethod


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


def test_a_wake_up_brings_back_what_an_exact_layer_keeps_beside_its_buffers(flash):
    """A level-2 sleep discards the memory in which layers are built."""
    kept = object.__new__(ExactAttention)
    kept._paged = SimpleNamespace(ones_like_codes=lambda codes: torch.full_like(codes, 129))
    kept._ones = torch.zeros(32, 16, dtype=torch.uint8)
    ones = kept._ones
    layer = torch.nn.Module()
    layer.impl = Batch(BATCHES["decodes"], size=64)._impl(flash.Fp8RLFlashImpl)
    layer.quant_method = object.__new__(Fp8RLKVCacheMethod)
    layer.layer_name = "model.layers.0.self_attn.attn"
    layer.quant_method.state = SimpleNamespace(kv_scales={})
    layer.quant_method.restore(layer)  # without exact there is nothing
    layer.impl.exact_attention = kept
    guard = RefitGuard({layer.layer_name: layer})
    guard.sleep(["weights"], {})
    guard.wake(None)
    guard.check()
    assert kept._ones is ones and (ones == 129).all()


@pytest.mark.parametrize(
    ("dtype", "changes", "expected"),
    [
        ("fp8_e4m3", {}, True),
        ("auto", {}, False),
        ("auto", {"exact": True}, True),
        ("int8_per_token_head", {"exact": True}, False),
        ("fp8_e4m3", {"kv_sharing_fast_prefill": True}, False),
        ("fp8_e4m3", {"speculative_config": object()}, False),
        ("fp8_e4m3", {"name": "fp8"}, False),
    ],
)
def test_engines_whose_batches_are_split(flash, dtype, changes, expected):
    given = changes.get
    recipe = SimpleNamespace(exact=given("exact", False))
    quantization = SimpleNamespace(
        get_name=lambda: given("name", "fp8rl"), resolve=lambda: SimpleNamespace(recipe=recipe)
    )
    shared = given("kv_sharing_fast_prefill", False)
    engine = SimpleNamespace(
        quant_config=quantization,
        cache_config=SimpleNamespace(cache_dtype=dtype, kv_sharing_fast_prefill=shared),
        speculative_config=given("speculative_config"),
    )
    assert flash._splits_batches(engine) is expected

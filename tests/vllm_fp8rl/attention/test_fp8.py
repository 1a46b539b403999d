"""How a batch is split into decodes and prompts, and what each kernel gets.

On a GPU with the real kernels. On a CPU plain torch stands in for FlashAttention and the Triton
kernels (``support.mixed_batch``), so nothing tells of their numerics there.
"""

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
@pytest.mark.parametrize(("layout", "limit"), [("NHD", 1), ("HND", 100), ("packed", 512)])
def test_every_batch_has_the_attention_of_its_requests(flash, requests, layout, limit) -> None:
    batch = Batch(requests, size=64, layout=layout, limit=limit)
    assert batch.errors(batch.attend(flash)).max() < 0.005


@pytest.mark.parametrize("page", [16, 48, 128])
def test_pages_of_any_size_and_padding_at_the_end(flash, page: int) -> None:
    for limit in (1, 100):
        batch = Batch(
            BATCHES["one token behind a prompt"], size=64, page=page, limit=limit, padding=2
        )
        assert batch.errors(batch.attend(flash)).max() < 0.005


def test_memory_behind_the_copy_does_not_count(flash, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_prompts_are_copied_in_groups_of_at_most_so_many_keys() -> None:
    requests = [(9, 1), (100, 20), (0, 300), (0, 60), (600, 2), (0, 5)]
    _, groups = split(requests, limit=400)
    assert [group.requests for group in groups] == [
        slice(1, 2),
        slice(2, 4),
        slice(4, 5),
        slice(5, 6),
    ]
    assert [group.keys for group in groups] == [120, 360, 602, 5]
    assert [group.longest for group in groups] == [120, 300, 602, 5]
    assert [group.longest_query for group in groups] == [20, 300, 2, 5]
    assert [group.tokens for group in groups][1:3] == [slice(21, 381), slice(381, 383)]
    assert groups[1].query_starts.tolist() == groups[1].key_starts.tolist() == [0, 300, 360]


def test_without_lengths_on_the_host_a_batch_is_not_split() -> None:
    bounds = Batch(BATCHES["prompts"]).common.seq_lens_cpu_upper_bound
    assert split(BATCHES["prompts"], seq_lens_cpu_upper_bound=None) is None
    assert split(BATCHES["prompts"], seq_lens_cpu_upper_bound=bounds[:-1]) is None


def test_an_exact_engine_never_attends_with_queries_in_fp8(flash) -> None:
    batch = Batch(BATCHES["decodes and prompts"], size=64)
    with pytest.raises(UnsupportedError, match="exact computes decodes and prompts apart, and a"):
        batch.attend(flash, splits=False, exact=True)


def test_a_wake_up_brings_back_what_an_exact_layer_keeps_beside_its_buffers(flash) -> None:
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
    ("changes", "expected"),
    [
        ({}, True),
        ({"cache_dtype": "auto"}, False),
        ({"cache_dtype": "auto", "exact": True}, True),
        ({"cache_dtype": "int8_per_token_head", "exact": True}, False),
        ({"kv_sharing_fast_prefill": True}, False),
        ({"speculative_config": object()}, False),
        ({"name": "fp8"}, False),
    ],
)
def test_engines_whose_batches_are_split(flash, changes: dict[str, Any], expected: bool) -> None:
    values = {
        "cache_dtype": "fp8_e4m3",
        "kv_sharing_fast_prefill": False,
        "speculative_config": None,
        "name": "fp8rl",
        "exact": False,
    } | changes
    recipe = SimpleNamespace(exact=values["exact"])
    engine = SimpleNamespace(
        quant_config=SimpleNamespace(
            get_name=lambda: values["name"], resolve=lambda: SimpleNamespace(recipe=recipe)
        ),
        cache_config=SimpleNamespace(**values),
        speculative_config=values["speculative_config"],
    )
    assert flash._splits_batches(engine) is expected

"""How a batch over an INT8 cache is split and written, and which engines and layers are served.

On a GPU with the real kernels. On a CPU plain torch stands in for FlashAttention and the Triton
kernels (``support.mixed_batch``), so nothing tells of their numerics there.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType

from fp8rl.errors import UnsupportedError
from support.mixed_batch import BATCHES, CLOSE, Int8Batch, load_int8


@pytest.fixture(scope="module")
def int8() -> Iterator[Any]:
    with load_int8() as module:
        yield module


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    ("layout", "page", "limit"),
    [("NHD", 16, 1), ("NHD", 16, 512), ("packed", 16, 512), ("NHD", 528, 512)],
)
def test_every_batch_has_the_attention_of_its_requests(
    int8, requests, layout: str, page: int, limit: int
) -> None:
    """A page of 528 tokens is one of a hybrid model, no multiple of the kernels' tiles."""
    batch = Int8Batch(requests, size=64, layout=layout, page=page, limit=limit)
    assert batch.errors(batch.attend(int8)).max() < CLOSE


def test_lengths_that_only_the_gpu_knows(int8) -> None:
    batch = Int8Batch(BATCHES["decodes and prompts"], size=64)
    batch.common.seq_lens_cpu_upper_bound = None
    assert batch.errors(batch.attend(int8)).max() < CLOSE


def test_a_batch_that_is_not_causal_is_refused(int8) -> None:
    batch = Int8Batch(BATCHES["prompts"], size=64)
    batch.common.causal = False
    with pytest.raises(UnsupportedError, match=r"not causal.*kv_cache\.dtype to auto"):
        batch.attend(int8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"name": "fp8"}, False),
        ({"cache_dtype": "fp8_e4m3"}, False),
        ({"cache_dtype": "auto"}, False),
        ({"speculative_config": object()}, False),
        ({"kv_sharing_fast_prefill": True}, False),
        ({"is_mm_prefix_lm": True}, False),
        ({"rswa_window": 128}, False),
        ({"dtype": torch.float32}, False),
        ({"window": 4096}, False),
        ({"head_size": 80}, False),
        ({"version": 2}, False),
        ({"invariant": True}, False),
    ],
)
def test_engines_that_are_served(
    int8, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], expected: bool
) -> None:
    values = {
        "name": "fp8rl",
        "cache_dtype": "int8_per_token_head",
        "speculative_config": None,
        "kv_sharing_fast_prefill": False,
        "is_mm_prefix_lm": False,
        "rswa_window": None,
        "dtype": torch.bfloat16,
        "window": None,
        "head_size": 128,
        "version": 3,
        "invariant": False,
    } | changes
    monkeypatch.setattr(int8.envs, "VLLM_BATCH_INVARIANT", values["invariant"], raising=False)
    monkeypatch.setattr(int8, "get_flash_attn_version", lambda head_size: values["version"])
    every = SimpleNamespace(
        **values,
        get_sliding_window=lambda: values["window"],
        get_head_size=lambda: values["head_size"],
    )
    engine = SimpleNamespace(
        quant_config=SimpleNamespace(get_name=lambda: values["name"]),
        cache_config=every,
        model_config=every,
        speculative_config=values["speculative_config"],
    )
    assert int8._serves(engine) is expected
    support = int8.Fp8RLTritonMetadataBuilder.get_cudagraph_support(engine, None)
    kinds = AttentionCGSupport
    assert support == (kinds.UNIFORM_SINGLE_TOKEN_DECODE if expected else kinds.ALWAYS)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"kv_cache_dtype": "auto"}, False),
        ({"attn_type": "encoder_only"}, False),
        ({"alibi_slopes": [0.5]}, False),
        ({"head_size": 80}, False),
        ({"sliding_window": (127, 0)}, False),
        ({"logits_soft_cap": 30.0}, False),
        ({"sinks": object()}, False),
        ({"chunk_lookback": 1}, False),
        ({"dcp_world_size": 2}, False),
    ],
)
def test_layers_that_are_served(int8, changes: dict[str, Any], expected: bool) -> None:
    impl = object.__new__(int8.Fp8RLTritonImpl)
    values = {
        "kv_cache_dtype": "int8_per_token_head",
        "attn_type": AttentionType.DECODER,
        "head_size": 128,
        "sliding_window": (-1, -1),
        "logits_soft_cap": 0,
        "alibi_slopes": None,
        "sinks": None,
        "chunk_lookback": -1,
        "dcp_world_size": 1,
    }
    for name, value in (values | changes).items():
        setattr(impl, name, value)
    assert impl._served() is expected


@pytest.mark.parametrize("ours", [True, False])
def test_batches_are_split_where_a_layer_is_served(
    int8, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """``Builder.__init__`` of vLLM is replaced by what it sets."""

    def init(builder: Any) -> None:
        layer = SimpleNamespace(impl=SimpleNamespace(ours=ours))
        forward = SimpleNamespace(static_forward_context={"a": layer})
        builder.vllm_config = SimpleNamespace(compilation_config=forward)
        builder.layer_names, builder.reorder_batch_threshold = ["a"], None

    monkeypatch.setattr(int8.TritonAttentionMetadataBuilder, "__init__", init)
    monkeypatch.setattr(int8, "_serves", lambda engine: True)
    builder = int8.Fp8RLTritonMetadataBuilder()
    assert builder._splits_batches is ours
    assert builder.reorder_batch_threshold == (1 if ours else None)

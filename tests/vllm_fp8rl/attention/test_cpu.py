"""The rounded cache of the CPU backend: values, attention over it, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import fake_quantize_int8_kv, fake_quantize_kv
from support.attention import causal_attention, fake_quantized
from support.engine import Engine

pytest.importorskip("vllm")
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_fp8rl.attention.cpu import Fp8RLCpuImpl, Fp8RLCpuMetadataBuilder

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 128  # of the session's checkpoint
BLOCK, BLOCKS = 128, 24
K_SCALE, V_SCALE = 2**-6, 2**-5


class Layer:
    """One attention layer outside a model: implementation, metadata builder and cache."""

    def __init__(self, vllm_config: Any, dtype: torch.dtype, kv_cache_dtype: str) -> None:
        config = copy.copy(vllm_config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.dtype = dtype
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.cache_dtype = kv_cache_dtype
        name = "model.layers.0.self_attn.attn"
        self.attention = config.compilation_config.static_forward_context[name]
        spec = copy.copy(self.attention.get_kv_cache_spec(config))
        config.cache_config.block_size = 2 * BLOCK  # the model's, beside gated delta nets
        with set_current_vllm_config(config):
            self.impl = make_impl(kv_cache_dtype)
            self.builder = Fp8RLCpuMetadataBuilder(spec, [name], config, torch.device("cpu"))
        isa = getattr(self.attention, "isa", None)  # of the layer from vLLM 0.29 on
        self.scales = SimpleNamespace(_k_scale_float=K_SCALE, _v_scale_float=V_SCALE, isa=isa)
        self.cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE, dtype=dtype)


def make_impl(kv_cache_dtype: str, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "num_heads": HEADS,
        "head_size": HEAD_SIZE,
        "scale": HEAD_SIZE**-0.5,
        "num_kv_heads": KV_HEADS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": kv_cache_dtype,
    }
    return Fp8RLCpuImpl(**(arguments | changes))


def config_of(engine: Engine) -> Any:
    return engine.llm.llm_engine.vllm_config


def random_tables(lengths: list[int], generator: torch.Generator) -> torch.Tensor:
    """Blocks of every request, drawn without order from the whole cache."""
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    table = torch.full((len(lengths), 4), BLOCKS - 1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for column in range(-(-length // BLOCK)):
            table[row, column] = free.pop()
    return table


def slots_of(table: torch.Tensor, row: int, positions: range) -> list[int]:
    return [int(table[row, p // BLOCK]) * BLOCK + p % BLOCK for p in positions]


def common_metadata(lengths: list[int], new: list[int], table: torch.Tensor) -> Any:
    starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    slots = [s for i, n in enumerate(new) for s in slots_of(table, i, range(lengths[i])[-n:])]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(lengths),
        num_actual_tokens=sum(new),
        max_query_len=max(new),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots),
    )


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def layer(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Layer]:
    yield Layer(config_of(engine), request.param, "fp8")


def run_and_check(layer: Layer, lengths: list[int], new: list[int], seed: int) -> None:
    """Write whole sequences in two steps, attend with the last ``new`` tokens of each."""
    dtype = layer.builder.dtype
    generator = torch.Generator().manual_seed(seed)
    table = random_tables(lengths, generator)
    keys, values = (
        [torch.randn(n, KV_HEADS, HEAD_SIZE, generator=generator).mul(s).to(dtype) for n in lengths]
        for s in (2.0, 3.0)
    )
    for row, length in enumerate(lengths):
        past = length - new[row]
        slots = torch.tensor(slots_of(table, row, range(past)), dtype=torch.int64)
        layer.impl.do_kv_cache_update(
            layer.scales, keys[row][:past], values[row][:past], layer.cache, slots
        )
    metadata = layer.builder.build(0, common_metadata(lengths, new, table))
    layer.impl.do_kv_cache_update(
        layer.scales,
        torch.cat([k[len(k) - n :] for k, n in zip(keys, new, strict=True)]),
        torch.cat([v[len(v) - n :] for v, n in zip(values, new, strict=True)]),
        layer.cache,
        metadata.slot_mapping,
    )
    query = torch.randn(sum(new), HEADS, HEAD_SIZE, generator=generator).to(dtype)
    output = torch.empty_like(query)
    layer.impl.forward(
        layer.scales, query, query, query, layer.cache, metadata, output
    )  # key and value come from the cache
    for row, (q, actual) in enumerate(zip(query.split(new), output.split(new), strict=True)):
        k, v = fake_quantized(keys[row], K_SCALE), fake_quantized(values[row], V_SCALE)
        whole = torch.cat([q.new_zeros(len(k) - len(q), *q.shape[1:]), q])
        expected = causal_attention(*(x[:, None] for x in (whole, k, v)))[-len(q) :].view(q.shape)
        # bfloat16: the softmax weights and the output are rounded to 8 bits.
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_equals_the_float64_formula_across_block_boundaries(layer):
    lengths = [1, 31, 32, 33, 63, 127, 128, 129, 200, 256, 257, 3]
    run_and_check(layer, lengths, [1] * len(lengths), seed=0)  # decode
    run_and_check(layer, lengths, lengths, seed=1)  # prefill
    run_and_check(layer, lengths, [(n + 1) // 2 for n in lengths], seed=2)  # chunked, mixed


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_the_trainer_rounds_k_and_v_to_what_the_cache_holds(engine, monkeypatch, dtype):
    """`kv_cache.in_training`: from equal K and V both attend over equal values, to the bit."""
    layer = Layer(config_of(engine), torch.bfloat16, dtype)
    monkeypatch.setattr(layer.impl, "exact", True)  # whose rows are in the order of tokens
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(2, 96, KV_HEADS, HEAD_SIZE, generator=generator).mul(4).bfloat16()
    slots = torch.cat((torch.arange(95), torch.tensor([-1])))  # -1 is padding
    layer.impl.do_kv_cache_update(layer.scales, *pair, layer.cache, slots)
    rows = layer.cache.view(BLOCKS * BLOCK, 2, KV_HEADS, HEAD_SIZE)
    clipped = torch.zeros(2, dtype=torch.int64)
    found = fake_quantize_int8_kv(*pair)
    if dtype == "fp8_e4m3":
        found = fake_quantize_kv(*pair, torch.tensor([K_SCALE, V_SCALE]), clipped)
        for half, scale in enumerate((K_SCALE, V_SCALE)):
            assert clipped[half] == (pair[half].float().abs() > 448 * torch.tensor(scale)).sum() > 0
    for half in (0, 1):
        assert torch.equal(found[half][:95], rows[:95, half])
    assert not rows[95:].any()


def test_vllm_allocates_a_cache_in_the_models_dtype(engine):
    config = config_of(engine)
    attention = config.compilation_config.static_forward_context["model.layers.0.self_attn.attn"]
    assert config.cache_config.cache_dtype == "fp8_e4m3"
    assert attention.kv_cache.dtype == config.model_config.dtype


def test_a_nan_stays_visible(engine):
    layer = Layer(config_of(engine), torch.float32, "fp8")
    key, value = torch.randn(2, 4, KV_HEADS, HEAD_SIZE).unbind()
    value[1, 0, 0] = torch.nan
    metadata = layer.builder.build(0, common_metadata([4], [4], torch.tensor([[2, 0, 0, 0]]).int()))
    layer.impl.do_kv_cache_update(layer.scales, key, value, layer.cache, metadata.slot_mapping)
    query = torch.randn(4, HEADS, HEAD_SIZE)
    output = torch.empty_like(query)
    layer.impl.forward(layer.scales, query, key, value, layer.cache, metadata, output)
    assert output[1:, 0, 0].isnan().all()
    assert not output[..., 1:].isnan().any()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "changes", "message"),
    [
        ("fp8_e5m2", {}, "no KV cache of dtype 'fp8_e5m2'.*'fp8'"),
        ("fp8", {"head_size": 40}, "Head size 40 has no attention kernel.*128"),
        ("auto", {"head_size": 40}, "Head size 40"),
        ("fp8", {"attn_type": "encoder_only"}, "'encoder_only'.*'auto'"),
    ],
)
def test_refuses(engine, kv_cache_dtype, changes, message):
    with set_current_vllm_config(config_of(engine)), pytest.raises(UnsupportedError, match=message):
        make_impl(kv_cache_dtype, **changes)

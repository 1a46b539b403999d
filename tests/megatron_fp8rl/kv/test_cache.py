"""Attention over K and V as an FP8 or INT8 cache holds them, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import scale_name
from fp8rl.numerics import fake_quantize_int8_kv
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.testing.models import build_gpt
from support.attention import causal_attention, fake_quantized, int8_rounded
from support.numeric import relative_error

LAYERS, HEADS, GROUPS, SIZE, LENGTH = 3, 4, 2, 64, 16
CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=SIZE,
    max_position_embeddings=64,
)


def run(model, seed: int = 0) -> torch.Tensor:
    ids = torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return model(ids, torch.arange(LENGTH).expand(2, -1), None)


def scales_of(model, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Scales of the model's own activations; a factor below 1 clips."""
    observer = QKVObserver(model)
    with torch.no_grad():
        run(model)
    observer.close()
    return {name: scale * factor for name, scale in observer.scales(1.0).items()}


@pytest.fixture
def model(mcore):
    return build_gpt(CONFIG, dtype=torch.float32)


class Spy:
    """What each layer's attention was called with, before and after the hooks, and its output."""

    def __init__(self, model: Any) -> None:
        self.raw: dict[int, tuple] = {}
        self.seen: dict[int, tuple] = {}
        self.out: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(model.decoder.layers):
            core = layer.self_attention.core_attention
            core.register_forward_pre_hook(self._keep(self.raw, number), prepend=True)
            core.register_forward_pre_hook(self._keep(self.seen, number))
            core.register_forward_hook(self._output(number))

    def _keep(self, table: dict[int, tuple], number: int) -> Any:
        return lambda module, args: table.update({number: args[:3]})

    def _output(self, number: int) -> Any:
        return lambda module, args, out: self.out.update({number: out.detach()})


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8_per_token_head"])
def test_attention_equals_a_float64_attention_over_what_the_cache_holds(mcore, kind, dtype, limit):
    """An INT8 cache from the start, one in FP8 from its first scales."""
    model = build_gpt(CONFIG, dtype=dtype)
    plain, scales = run(model), scales_of(model)
    cache = KVCacheInTraining(model, kind)
    spy = Spy(model)
    if cache.has_scales:
        assert torch.equal(run(model), plain) and not cache.in_service
        cache.set(scales)
    assert cache.in_service and not torch.equal(run(model), plain)
    for number, (q, k, v) in spy.raw.items():
        held = [
            fake_quantized(x, float(scales[scale_name(number, role)]))
            if cache.has_scales
            else int8_rounded(x)
            for x, role in ((k, "k"), (v, "v"))
        ]
        assert relative_error(spy.out[number], causal_attention(q, *held)) < limit
        assert relative_error(spy.out[number], causal_attention(q, k, v)) > 1e-3
        for x, expected in zip(spy.seen[number][1:], held, strict=True):
            assert relative_error(x, expected) < torch.finfo(dtype).eps
    with cache.switched_off():
        assert torch.equal(run(model), plain)
    if cache.has_scales:
        cache.clear()
        assert torch.equal(run(model), plain)
        cache.set(scales)
    cache.close()
    assert torch.equal(run(model), plain)


@pytest.mark.parametrize(
    "kinds", [(QKVObserver, KVCacheInTraining), (KVCacheInTraining, QKVObserver)]
)
def test_observers_see_the_values_before_quantization(model, kinds):
    scales = scales_of(model)
    made: dict[Any, Any] = {kind: kind(model) for kind in kinds}
    spy = Spy(model)
    made[KVCacheInTraining].set({name: scale * 0.01 for name, scale in scales.items()})
    run(model)
    for number, tensors in spy.raw.items():
        peaks = torch.stack([x.abs().max() for x in tensors])
        assert torch.equal(made[QKVObserver].amax()[number], peaks)
        for x, peak in zip(spy.seen[number][1:], peaks[1:], strict=True):
            assert x.abs().max() < 0.02 * peak


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_gradients_pass_straight_through_also_those_of_clipped_values(model, dtype):
    cache = KVCacheInTraining(model, dtype)
    if cache.has_scales:
        cache.set(scales_of(model, 0.2))
    core = model.decoder.layers[1].self_attention.core_attention
    g = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(LENGTH, 2, heads, SIZE, generator=g).requires_grad_()
        for heads in (HEADS, GROUPS, GROUPS)
    )
    weight = torch.randn(LENGTH, 2, HEADS * SIZE, generator=g)
    (core(q, k, v, None) * weight).sum().backward()
    if cache.has_scales:
        pairs = zip((k, v), cache._scales[1], strict=True)
        held = [fake_quantized(x, float(scale)).float() for x, scale in pairs]
        assert (held[0].abs() < k.abs()).any()
    else:
        held = list(fake_quantize_int8_kv(k, v))
    assert (held[0] != k).any()
    cache.clear()
    (core(q, *(x.requires_grad_() for x in held), None) * weight).sum().backward()
    for x, other in zip((k, v), held, strict=True):
        assert torch.equal(x.grad, other.grad)


def test_recomputed_attention_sees_the_same_keys_and_values(mcore):
    """The second forward must quantize too: without it the gradients would differ."""
    found = []
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    for options in ({}, recompute):
        model = build_gpt(CONFIG, dtype=torch.float32, **options)
        cache = KVCacheInTraining(model)
        cache.set(scales_of(model, 0.5))
        run(model).square().mean().backward()
        found.append(([p.grad for p in model.parameters()], cache.metrics()))
    (grads, shares), (others, other_shares) = found
    assert all(map(torch.equal, grads, others))
    assert shares == other_shares and shares["k_clipped_share"] > 0  # counted once


def test_clipped_values_are_counted(model):
    scales = scales_of(model, 0.25)
    cache = KVCacheInTraining(model)
    cache.set(scales)
    spy = Spy(model)
    expected = {"k": 0, "v": 0}
    for seed in range(2):
        run(model, seed)
        for number, (_, k, v) in spy.raw.items():
            for x, role in ((k, "k"), (v, "v")):
                scaled = x.detach() / scales[scale_name(number, role)]
                expected[role] += int((scaled.abs() > 448).sum())
    total = 2 * LAYERS * LENGTH * 2 * GROUPS * SIZE
    assert cache.metrics() == {f"{r}_clipped_share": n / total for r, n in expected.items()}
    assert all(expected.values())
    assert cache.metrics() == {}


def test_scales_are_checked_before_any_is_set(model):
    scales = scales_of(model)
    cache = KVCacheInTraining(model)
    last = scale_name(LAYERS - 1, "v")
    lacking = {name: scale for name, scale in scales.items() if name != last}
    with pytest.raises(ScaleError, match=f"'{last}' is missing"):
        cache.set(lacking)
    with pytest.raises(ScaleError, match=f"'{last}' is 0"):
        cache.set(lacking | {last: 0.0})
    assert not cache.in_service and (cache._scales == 1).all()
    cache.set({name: float(scale) for name, scale in scales.items()})
    expected = [[float(scales[scale_name(n, role)]) for role in "kv"] for n in range(LAYERS)]
    assert cache._scales.tolist() == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("multi_latent_attention", True, "multi-latent attention"),
        ("cuda_graph_impl", "local", "config.cuda_graph_impl='local'.*in_training to false"),
    ],
)
def test_a_model_with_latents_or_in_cuda_graphs_is_refused(model, option, value, message):
    """Whether scales are set is decided in Python, which a replayed graph does not run."""
    setattr(model.config, option, value)
    with pytest.raises(UnsupportedError, match=message):
        KVCacheInTraining(model)


def test_an_int8_cache_takes_no_scales(model):
    cache = KVCacheInTraining(model, "int8_per_token_head")
    with pytest.raises(ScaleError, match=r"makes its own scales.*do not call it"):
        cache.set(scales_of(model))
    assert cache.in_service


def test_a_second_one_of_the_same_model_is_refused_until_the_first_is_closed(model):
    first = KVCacheInTraining(model)
    with pytest.raises(UnsupportedError, match=r"layer 0 already belongs to a .* close\(\) first"):
        KVCacheInTraining([model])
    first.close()
    KVCacheInTraining(model)

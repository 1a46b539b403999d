"""KV scales and K and V of 8 bits in the attention of a model of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import scale_name
from support.attention import fake_quantized, int8_rounded
from support.hf import LENGTH, RAGGED, convert_alone, hf_model, ids, loss_of
from support.numeric import relative_error
from torch_fp8rl.kv import KVCacheInTraining, QKVObserver

SCALES = {scale_name(layer, role): 2.0**-7 for layer in range(2) for role in "kv"}
"""Small enough to clip."""


class Seen:
    """What goes into and comes out of the attention of layer 0."""

    def __init__(self, model: Any) -> None:
        self.module = model.model.layers[0].self_attn
        self.module.register_forward_pre_hook(self._into, with_kwargs=True)
        self.module.o_proj.register_forward_pre_hook(self._out_of)

    def _into(self, module: Any, args: Any, kwargs: Any) -> None:
        self.x, self.positions = kwargs["hidden_states"], kwargs["position_embeddings"]

    def _out_of(self, module: Any, args: Any) -> None:
        self.attended = args[0]

    def qkv(self) -> list[torch.Tensor]:
        """q, k and v as the cache sees them, ``[batch, heads, tokens, head size]``."""
        module, found = self.module, []
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(module, name)(self.x)
            found.append(rows.view(*rows.shape[:-1], -1, module.head_dim))
        q, k, v = found
        q, k = (norm(x).transpose(1, 2) for norm, x in ((module.q_norm, q), (module.k_norm, k)))
        return [*apply_rotary_pos_emb(q, k, *self.positions), v.transpose(1, 2)]


@pytest.fixture
def model() -> Any:
    found = hf_model("qwen3", RAGGED)
    convert_alone(found)
    return found.eval()


def test_the_observer_sees_what_the_cache_would(model: Any):
    seen, observer = Seen(model), QKVObserver(model)
    with torch.no_grad():
        for seed in range(2):
            model(ids(seed))
            if seed == 0:
                first = torch.stack([x.abs().amax() for x in seen.qkv()]).float()
                assert torch.equal(observer.amax()[0], first)
        second = torch.stack([x.abs().amax() for x in seen.qkv()]).float()
    assert torch.equal(observer.amax()[0], torch.maximum(first, second))
    scales = observer.scales(margin=1.0)
    assert set(scales) == {scale_name(layer, role) for layer in range(2) for role in "qkv"}
    scale = float(scales[scale_name(0, "k")])
    amax = float(observer.amax()[0, 1])
    assert amax / 448 <= scale < 2 * amax / 448
    observer.close()
    observer.reset()
    model(ids(0))
    assert not observer.amax().any()


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8_per_token_head"])
def test_attention_is_over_k_and_v_of_the_cache(model: Any, dtype: Any):
    seen, plain = Seen(model), model(ids()).logits
    cache = KVCacheInTraining(model, dtype)
    observer = QKVObserver(model)  # after the cache, and it sees the values before it
    if dtype == "fp8_e4m3":
        assert torch.equal(model(ids()).logits, plain)
        cache.set(SCALES)
    with torch.no_grad():
        logits = model(ids()).logits
        q, k, v = seen.qkv()
    if dtype == "fp8_e4m3":
        held = [fake_quantized(x, 2.0**-7) for x in (k, v)]
    else:
        held = [int8_rounded(x) for x in (k, v)]
    assert not torch.equal(held[0].to(k.dtype), k)
    truth = attend(*(x.double() for x in (q, *held)), is_causal=True, enable_gqa=True)
    got = seen.attended.view(2, LENGTH, 3, 64).transpose(1, 2)
    assert relative_error(got, truth) < 4e-3
    assert torch.equal(observer.amax()[0, 1], k.abs().amax().float())
    assert not torch.equal(logits, plain)
    clipped = cache.metrics()
    assert (clipped["k_clipped_share"] > 0) if dtype == "fp8_e4m3" else (clipped == {})
    with cache.switched_off():
        assert torch.equal(model(ids()).logits, plain)
    cache.close()
    assert torch.equal(model(ids()).logits, plain)


def test_recomputed_activations_are_the_first_ones(model: Any):
    cache, found = KVCacheInTraining(model.train()), []
    for checkpointing in (False, True):
        cache.set(SCALES)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss_of(model).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    cache.clear()
    loss_of(model).backward()
    assert all(map(torch.equal, *found))
    assert not torch.equal(model.model.layers[1].self_attn.k_proj.weight.grad, found[0][-3])


def test_what_is_refused(model: Any):
    with pytest.raises(UnsupportedError, match="holds K and V as they are"):
        KVCacheInTraining(model, "auto")
    first = KVCacheInTraining(model)
    with pytest.raises(UnsupportedError, match="two would quantize K and V twice"):
        KVCacheInTraining(model)
    first.close()
    second = KVCacheInTraining(model)
    with pytest.raises(ScaleError, match=r"layers\.1.*v_scale' is missing"):
        second.set({name: scale for name, scale in SCALES.items() if name != [*SCALES][-1]})
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedError, match="attends by 'eager'"):
        model(ids())
    second.close()
    model(ids())
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        QKVObserver(model)


def test_another_implementation_is_followed(model: Any):
    observer = QKVObserver(model)
    model(ids())
    before = observer.amax()
    observer.reset()
    AttentionInterface.register("another", sdpa_attention_forward)
    AttentionMaskInterface.register("another", sdpa_mask)
    model.config._attn_implementation = "another"
    model(ids())
    assert torch.equal(observer.amax(), before)

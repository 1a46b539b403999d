"""What ``exact`` refuses, and who puts its attention into service; bits: vllm_fp8rl/test_exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.kernels.rotary_table import inverse_frequencies
from fp8rl.kv_scales import scale_names
from megatron_fp8rl import convert
from megatron_fp8rl.conversion import adopt, prepare
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import core_attentions
from megatron_fp8rl.layers import exact
from megatron_fp8rl.layers.exact import (
    ExactCore,
    ExactSelfAttention,
    OfForward,
    Rotation,
    _frequencies,
    exact_class,
)
from megatron_fp8rl.layers.linear import Fp8Linear
from megatron_fp8rl.testing.models import build_gpt
from support.attention import causal_attention

EXACT = Recipe.from_dict({"exact": True})
AUTO = Recipe.from_dict({"exact": True, "kv_cache": {"dtype": "auto"}})
SIZE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}

LLAMA, QWEN3 = LlamaConfig(**SIZE), Qwen3Config(**SIZE)
MIXTURE = Qwen3MoeConfig(**SIZE, **EXPERTS, norm_topk_prob=True)
FUSED = {"bias_activation_fusion": True}


HEAD, NORM = torch.nn.Linear(128, 64).bfloat16(), torch.nn.LayerNorm(64).bfloat16()
LAYER = "decoder.layers.0"
EXPERT = f"{LAYER}.mlp.experts.local_experts.0"
ANOTHER_MLP = r"a SwiGLU that .* layer 0 has another; set config\.bias_activation_fusion to true"
REFUSED: list[tuple[Any, str, Any, str]] = [
    (LLAMA, "config.bias_activation_fusion", False, ANOTHER_MLP),
    (LLAMA, "decoder.final_layernorm.weight", torch.nn.Parameter(torch.ones(128)), "needs bfloat1"),
    (LLAMA, "config.hidden_dropout", 0.1, "exact needs hidden_dropout 0 in the trainer, not 0.1"),
    (LLAMA, "config.softmax_scale", 0.5, "needs softmax_scale None in the trainer, not 0.5"),
    (LLAMA, "config.should_pad_vocab", True, "should_pad_vocab False in the trainer, not True"),
    (LLAMA, "config.tensor_model_parallel_size", 4, "tensor_model_parallel_size 1 or 2, not 4"),
    (LLAMA, "rotary_pos_emb.seq_len_interpolation_factor", 2.0, r"_factor None .* not 2\.0"),
    (LLAMA, f"{LAYER}.self_attention", torch.nn.Identity(), "SelfAttention in layer 0, not Iden"),
    (LLAMA, "output_layer", HEAD, "ColumnParallelLinear at 'output_layer', not Linear"),
    (QWEN3, f"{LAYER}.self_attention.q_layernorm", NORM, r"q_layernorm', not .*\.LayerNorm"),
    (MIXTURE, "config.hidden_dropout", 0, r"exact needs a Hopper GPU"),
    (MIXTURE, f"{EXPERT}.config.bias_activation_fusion", False, ANOTHER_MLP),
    (MIXTURE, "config.moe_router_pre_softmax", True, "needs moe_router_pre_softmax False in the"),
    (MIXTURE, f"{LAYER}.mlp.router.is_aux_loss_enabled", lambda: True, "a loss for load balanci"),
    (MIXTURE, "config.expert_tensor_parallel_size", 2, "needs expert_tensor_parallel_size 1 in"),
]


@pytest.mark.parametrize(("config", "path", "value", "message"), REFUSED)
def test_what_would_not_be_exact_is_refused_before_anything_changes(
    mcore, config, path, value, message
):
    model = build_gpt(config, bias_activation_fusion=True)
    parent, _, name = path.rpartition(".")
    setattr(attrgetter(parent)(model) if parent else model, name, value)
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=message):
        convert(model, EXACT)
    assert [type(module) for module in model.modules()] == before


def exact_attention(model: Any, recipe: Recipe = EXACT) -> list[Any]:
    """Change the classes of ``core_attention`` as ``convert`` does on a GPU."""
    cores: list[Any] = [core for _, core in core_attentions([model])]
    for core in cores:
        core.__class__ = exact_class(ExactCore, type(core))
        core.fp8_setup, core.exact_forward = SimpleNamespace(recipe=recipe), OfForward()
    return cores


def test_a_conversion_that_breaks_off_leaves_nothing(mcore, monkeypatch):
    """An interrupt when the linears and one attention have changed."""
    model = build_gpt(LLAMA)
    before = [(type(module), set(vars(module))) for module in model.modules()]
    attention = model.decoder.layers[0].self_attention

    def interrupted(chunks: Any) -> Iterator[Any]:
        rotation = Rotation(inverse_frequencies(1e4, 64))
        yield attention, ExactSelfAttention, {"exact_rotation": rotation}
        assert isinstance(attention.linear_qkv, Fp8Linear)
        raise KeyboardInterrupt

    monkeypatch.setattr(exact, "plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(model, EXACT)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before


def test_the_cache_puts_exact_attention_into_service_and_takes_it_out(mcore):
    """Before it has scales upstream's attention runs over K and V as they are."""
    model = build_gpt(LLAMA, dtype=torch.float32)
    tokens = torch.randint(0, 64, (1, 20))
    positions = torch.arange(20)[None]
    expected = model(tokens, positions, None)
    before = [set(vars(core)) for _, core in core_attentions([model])]
    cores = exact_attention(model)
    with pytest.raises(UnsupportedError, match=r"make KVCacheInTraining\(model, recipe\.kv_cache"):
        model(tokens, positions, None)
    with pytest.raises(UnsupportedError, match=r"make KVCacheInTraining\(model, 'fp8_e4m3'\)"):
        KVCacheInTraining(model, "int8_per_token_head")
    cache = KVCacheInTraining(model)
    assert not any(core.exact_cache.in_service for core in cores)
    assert torch.equal(model(tokens, positions, None), expected)
    with pytest.raises(UnsupportedError, match="already belongs to a KVCacheInTraining"):
        KVCacheInTraining(model)
    cache.set(dict.fromkeys(scale_names(2, ["k", "v"]), 2.0**-6))
    for number, core in enumerate(cores):
        assert core.exact_cache.in_service and not core._forward_pre_hooks
        assert core.exact_cache.scales.data_ptr() == cache._scales[number].data_ptr()
    with pytest.raises(UnsupportedError, match="attention_mask is not the causal one; give None"):
        model(tokens, positions, torch.zeros(1, 1, 20, 20).bool())
    cache.close()
    assert all(isinstance(core, ExactCore) and core.exact_cache is None for core in cores)
    cache = KVCacheInTraining(model)
    for core in cores:  # as Conversion.close does
        core.give_back()
    cache.close()
    assert [set(vars(core)) for core in cores] == before
    assert torch.equal(model(tokens, positions, None), expected)


def test_attention_over_16_bits_is_in_service_without_a_cache(mcore):
    """Tokens behind the last packed sequence, whatever is there, get zeros and give none."""
    model = build_gpt(LLAMA, dtype=torch.float32)
    tokens, positions = torch.randint(0, 64, (2, 20)), torch.arange(20)[None]
    expected = model(tokens, positions, None)
    core, _ = exact_attention(model, AUTO)
    torch.testing.assert_close(model(tokens, positions, None), expected)
    with pytest.raises(UnsupportedError, match="make no KVCacheInTraining"):
        KVCacheInTraining(model, "auto")
    starts = torch.tensor([0, 3, 5])
    packed = SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_q_padded=None, max_seqlen_q=3)
    query, key, value = torch.randn(9, 2, 64), torch.randn(9, 1, 64), torch.randn(9, 1, 64)
    rows = [torch.cat((x[:5], x[5:] / 0)).requires_grad_() for x in (query, key, value)]
    out = core(*rows, None, packed_seq_params=packed)
    parts = [causal_attention(*(x[i:j, None] for x in rows))[:, 0] for i, j in ((0, 3), (3, 5))]
    torch.testing.assert_close(out, torch.cat([*parts, torch.zeros(4, 128)]).float())
    for grad in torch.autograd.grad(out.square().sum(), rows):
        assert grad[:5].isfinite().all() and grad[:5].any() and not grad[5:].any()


def test_causal_masks_are_served_and_no_others(mcore, monkeypatch):
    """NeMo RL gives the causal one where it does not pack; Megatron squeezes what is packed."""
    seen: list[Any] = []

    def attend(query: Any, key: Any, value: Any, starts: Any, layer: Any) -> Any:
        seen.append((tuple(query.shape), starts.tolist()))
        return query

    monkeypatch.setattr(exact, "_attend_on_cpu", attend)
    core: Any = exact_attention(build_gpt(LLAMA))[0]
    core.exact_cache = SimpleNamespace(in_service=True, count=lambda *_: None)
    core.exact_forward = OfForward()
    query, key = torch.randn(5, 2, 2, 64), torch.randn(5, 2, 1, 64)
    mask = torch.ones(5, 5).triu(1).bool()
    causal, padded = AttnMaskType.causal, AttnMaskType.padding_causal
    for given in (None, mask[None, None], mask.expand(2, 1, 5, 5)):
        out = core(query, key, key, given, attn_mask_type=causal, packed_seq_params=None)
        assert torch.equal(out, query.flatten(2)) and seen.pop() == ((5, 4, 64), [0, 5])
    starts = torch.tensor([0, 3, 5])
    packed = SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_q_padded=None, max_seqlen_q=3)
    rows = query[:, 0], key[:, 0], key[:, 0]
    for kind in (causal, padded):
        out = core(*rows, None, attn_mask_type=kind, packed_seq_params=packed)
        assert torch.equal(out, query[:, 0].flatten(1)) and seen.pop() == ((5, 2, 64), [0, 3, 5])
    wrong = mask.clone()
    wrong[4, 0] = True
    a_row, no_causal = (query, key, key), "is not the causal one"
    no_kind = r"attn_mask_type .* and no attention_bias"
    for given, message, options in (
        ((*rows, mask[None, None]), no_causal, {"packed_seq_params": packed}),  # of the whole row
        ((*a_row, wrong[None, None]), no_causal, {}),
        ((*a_row, mask.float()), no_causal, {}),
        ((*a_row, mask[0].view(1, 1, 1, 5)), no_causal, {}),
        ((*a_row, None), no_kind, {"attn_mask_type": padded}),
        ((*a_row, None), no_kind, {"attn_mask_type": AttnMaskType.no_mask}),
        ((*a_row, None), "and an attention_bias", {"attention_bias": torch.zeros(1)}),
    ):
        with pytest.raises(UnsupportedError, match=message):
            core(*given, **options)
    assert not seen


def test_the_frequencies_of_llama_3_are_found_in_the_model():
    """GPTModel keeps no factor; float32 frequencies tell it."""
    scaling: dict[str, Any] = {"rope_scaling": True, "rope_scaling_factor": 32.0}
    theirs = RotaryEmbedding(
        128, rotary_percent=1.0, rotary_base=500_000, use_cpu_initialization=True, **scaling
    )
    chunk = SimpleNamespace(
        rotary_base=500_000,
        rotary_scaling=True,
        rotary_pos_emb=theirs,
        config=SimpleNamespace(kv_channels=128),
    )
    assert torch.equal(_frequencies(chunk), inverse_frequencies(500_000.0, 128, 32.0))
    theirs.inv_freq[40] *= 1.0001
    with pytest.raises(UnsupportedError, match=r"this model has other frequencies"):
        _frequencies(chunk)


def test_a_model_that_has_scored_in_inference_mode_trains(mcore):
    """The table of the first forward serves the later ones, gradients included."""
    model = build_gpt(LLAMA, **FUSED)
    convert(model, AUTO)
    tokens, positions = torch.arange(7)[None], torch.arange(7)[None]
    with torch.inference_mode():
        scored = model(tokens, positions, None)
    trained = model(tokens, positions, None)
    trained.float().square().sum().backward()
    assert torch.equal(scored, trained)
    assert model.decoder.layers[0].self_attention.linear_qkv.weight.grad.any()


def test_padding_belongs_to_the_packed_sequence_before_it():
    """Tokens beyond the longest would have no result; an empty sequence has no tokens."""
    packed = SimpleNamespace(
        cu_seqlens_q=torch.tensor([0, 3, 3, 5], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, 4, 4, 8], dtype=torch.int32),
        max_seqlen_q=3,
    )
    positions, _ = Rotation(inverse_frequencies(1e4, 64)).at(torch.zeros(8, 1, 2, 64), packed)
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert OfForward().longest(packed) == 4


def test_a_mask_that_has_changed_is_looked_at_again(monkeypatch):
    """And only then, as the device is waited for; recomputed layers get the mask detached."""
    looked: list[int] = []
    hides = exact._hides_what_comes_later
    monkeypatch.setattr(
        exact, "_hides_what_comes_later", lambda mask: looked.append(1) or hides(mask)
    )
    forward, mask = OfForward(), torch.ones(1, 1, 5, 5).triu(1).bool()
    assert all(forward.is_causal(given, 5) for given in (mask, mask, mask.detach()))
    assert len(looked) == 1
    assert copy.deepcopy(forward).is_causal(mask, 5)  # naively its memory was freed twice
    mask[0, 0, 4, 0] = True
    assert not forward.is_causal(mask, 5)
    del mask
    for _ in range(4):  # where the last one's memory may be taken again
        assert forward.is_causal(torch.ones(1, 1, 5, 5).triu(1).bool(), 5)
        assert not forward.is_causal(torch.ones(1, 1, 5, 5).tril().bool(), 5)


def test_what_a_forward_refuses(mcore):
    """Megatron's own inference, whose tokens start at later positions; an MLP taken apart."""
    model = build_gpt(LLAMA, **FUSED)
    adopt(prepare(model.config, EXACT), [model])
    attention = model.decoder.layers[0].self_attention
    attention.__class__ = ExactSelfAttention
    with pytest.raises(UnsupportedError, match="exact does not serve Megatron's own inference"):
        attention(torch.zeros(1, 1, 128), None, inference_context=object())
    mlp = model.decoder.layers[0].mlp
    mlp.linear_fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="exact needs the fused SwiGLU, and hooks on"):
        mlp(torch.zeros(4, 1, 128, dtype=torch.bfloat16))

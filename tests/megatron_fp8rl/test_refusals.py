"""What is not served is refused in a sentence, by name, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from torch.nn.parallel import DistributedDataParallel

from fp8rl.errors import (
    CheckpointError,
    Fp8RLError,
    PinError,
    RecipeError,
    ScaleError,
    UnsupportedError,
)
from fp8rl.kv_scales import scale_name
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.router_replay import ReplayedRoutes
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import convert_alone, dense, losses, pinned, tokens

pytestmark = pytest.mark.usefixtures("mcore")

DOWN = "model.layers.0.mlp.down_proj.weight"
SERVED = dense(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "convert": convert_alone,
    "conversion_of": conversion_of,
    "export_hf": lambda model: list(export_hf(model)),
    "load_hf": lambda model: load_hf(model, dict(export_hf(build_gpt(dense())))),
    "QKVObserver": QKVObserver,
    "KVCacheInTraining": KVCacheInTraining,
    "ReplayedRoutes": ReplayedRoutes,
}


SCALES: dict[Any, Any] = {scale_name(layer, role): 1.0 for layer in range(2) for role in "kv"}


def wire_of(gpt: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The tensors of a model as FP8 codes, and the policy of its conversion."""
    policy = convert_alone(gpt).policy
    return dict(fp8_wire(dict(export_hf(gpt)), policy)), policy


def quantize_codes_again(gpt: Any) -> None:
    wire, policy = wire_of(gpt)
    list(fp8_wire(wire, policy))


def with_tensor(tensor: Any) -> Callable[[Any], object]:
    return lambda gpt: load_hf(gpt, {**dict(export_hf(gpt)), DOWN: tensor})


def scales_of(scales: Any) -> Callable[[Any], object]:
    return lambda gpt: KVCacheInTraining(gpt).set(scales)


def wire(tensors: Any) -> Callable[[Any], object]:
    return lambda gpt: list(fp8_wire(tensors, convert_alone(gpt).policy))


STREAM = "give pairs of name and tensor, or a mapping"
BF16 = torch.ones(128, 256, dtype=torch.bfloat16)
CALLS: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda gpt: convert_alone(torch.nn.Linear(2, 2)), UnsupportedError, "GPTModel"),
    (lambda gpt: convert_alone(gpt, pinned(layers=(7,))), PinError, "7 matches nothing"),
    (lambda gpt: convert_alone(gpt, gemm_backend="fast"), UnsupportedError, "no GEMM backend 'f"),
    (partial(export_hf, vocab_size=10_000), CheckpointError, "is not within the model's"),
    (partial(convert, recipe="r.yaml"), RecipeError, r"make one with Recipe\.load\(path\)"),
    *(
        (with_tensor(tensor), CheckpointError, f"'{DOWN}' {message}")
        for tensor, message in (
            (np.ones((128, 256), np.float32), "is a ndarray"),
            (BF16.to("meta"), "is without values"),
            (BF16.to_sparse(), "is sparse"),
            (BF16.to(torch.complex64), "is torch.complex64"),
        )
    ),
    (lambda gpt: load_hf(gpt, "model.safetensors"), UnsupportedError, STREAM),
    (wire("model.safetensors"), UnsupportedError, STREAM),
    (quantize_codes_again, UnsupportedError, r"weight' holds torch\.float8_e4m3fn, which cannot"),
    (wire({DOWN: np.ones((128, 256))}), UnsupportedError, f"'{DOWN}' is no torch.Tensor"),
    (lambda gpt: list(fp8_wire({}, pinned())), UnsupportedError, "The policy is a Recipe"),
    (
        wire([("model.layers.0.mlp.experts.gate_up_proj", torch.randn(3, 4, 4))]),
        UnsupportedError,
        "stacks the experts",
    ),
    (
        lambda gpt: list(fp8_wire([], convert_alone(gpt).policy, tensor_parallel_size=0)),
        UnsupportedError,
        r"^tensor_parallel_size=.*: give the number of",
    ),
    *(  # naively anything but fp8_e4m3 was INT8
        (partial(KVCacheInTraining, dtype=kind), UnsupportedError, message)
        for kind, message in (
            ("fp8", "There is no KV cache of dtype"),
            ("auto", "dtype 'auto' holds K and V as they are"),
        )
    ),
    (scales_of({**SCALES, scale_name(1, "k"): "1"}), ScaleError, r"1\.self_attn\.k_scale' is a "),
    (scales_of(list(SCALES.values())), ScaleError, "give a mapping from name to scale"),
    (
        lambda gpt: QKVObserver(gpt).load_state_dict({"counts": torch.zeros(1)}),
        CheckpointError,
        "it needs 'amax' alone",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_refused(call: Callable[[Any], object], error: type[Exception], message: str) -> None:
    gpt = build_gpt(dense())
    before = {name: tensor.clone() for name, tensor in gpt.named_parameters()}
    with pytest.raises(error, match=message):
        call(gpt)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt.named_parameters())


NO_MODELS: dict[str, Callable[[Any], Any]] = {
    "None": lambda gpt: None,
    "generator": lambda gpt: (chunk for chunk in [gpt]),
    "empty": lambda gpt: [],
    "decoder": lambda gpt: gpt.decoder,
}


@pytest.mark.parametrize(
    ("function", "kind"),
    [*(("convert", kind) for kind in NO_MODELS), *((each, "decoder") for each in OF_A_MODEL)],
)
def test_what_is_no_model_is_refused(function, kind):
    with pytest.raises(UnsupportedError, match=r"GPTModel"):
        OF_A_MODEL[function](NO_MODELS[kind](build_gpt(dense())))


@pytest.mark.parametrize("function", ["convert", "QKVObserver", "KVCacheInTraining", "export_hf"])
def test_two_models_are_no_chunks_of_one(function):
    models = [build_gpt(dense()) for _ in range(2)]
    with pytest.raises(Fp8RLError, match="twice"):
        OF_A_MODEL[function](models)


class TELinear(ColumnParallelLinear):
    """As TransformerEngine's."""


REFUSED_OPTIONS: dict[str, tuple[Any, str]] = {
    "fp8": ("e4m3", r"config\.fp8='e4m3'"),
    "fp4": ("e2m1", r"config\.fp4='e2m1': megatron's own FP4"),
    "enable_autocast": (True, "enable_autocast"),
    "tp_comm_overlap": (True, "tp_comm_overlap=True: user buffers"),
    "cuda_graph_impl": ("local", "cuda_graph_impl='local': a replayed graph"),
    "delay_wgrad_compute": (True, "delay_wgrad_compute=True: FP8 linears compute"),
    "experimental_attention_variant": ("dsa", "variant='dsa': its linear layers are"),
    "cache_mla_latents": (True, "cache_mla_latents=True: absorption"),
    "mla_down_proj_fusion": (True, "mla_down_proj_fusion=True: two HF matrices"),
    "heterogeneous_block_specs": (True, "heterogeneous_block_specs=True: its layers"),
    "moe_latent_size": (64, "moe_latent_size=64: latent projections"),
}
REFUSED_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "mlp.linear_fc2.weight.__fsdp_param__": (True, r"linear_fc2' is sharded by Megatron-FSDP"),
    "mlp.linear_fc1.__class__": (TELinear, r"layers\.1\.mlp\.linear_fc1' is a TELinear"),
    "self_attention.world_size": (
        4,
        r"linear_qkv' spreads one query group over several ranks \(2 groups, TP 4\)",
    ),
    "self_attention.hidden_size_per_attention_head": (
        32,
        r"linear_qkv' has 512 rows where its config says 256",
    ),
    "mlp.latent": (torch.nn.Linear(4, 4), r"1\.mlp\.latent\.weight' belongs to a Linear"),
}
REFUSED = {
    **{f"config.{name}": each for name, each in REFUSED_OPTIONS.items()},
    **{f"decoder.layers.1.{name}": each for name, each in REFUSED_ATTRIBUTES.items()},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_served_is_named(path):
    gpt = build_gpt(SERVED)
    (value, message), (parent, _, name) = REFUSED[path], path.rpartition(".")
    setattr(attrgetter(parent)(gpt), name, value)
    classes = [type(m) for m in gpt.modules()]
    with pytest.raises(UnsupportedError, match=message):
        convert_alone(gpt)
    assert [type(m) for m in gpt.modules()] == classes


class OfBridge(torch.nn.Module):
    """As Megatron-Bridge's AdapterWrapper, which is not installed here."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = linear, torch.nn.Linear(128, 4)


def _with_parameters(linear: torch.nn.Module) -> torch.nn.Module:
    """As peft does."""
    linear.lora_A = torch.nn.Parameter(torch.zeros(4, 128))
    return linear


@pytest.mark.parametrize("adapter", [OfBridge, _with_parameters])
def test_adapters_are_refused_by_name_and_the_remedy_serves(adapter):
    gpt = build_gpt(dense())
    layer = gpt.decoder.layers[1].self_attention
    layer.linear_proj = adapter(layer.linear_proj)
    with pytest.raises(
        UnsupportedError, match=r"layers\.1\.self_attention\.linear_proj' is a .*LoRA"
    ):
        convert_alone(gpt)
    with pytest.raises(
        UnsupportedError, match=r"linear_proj' has an adapter.*; merge the adapters"
    ):
        export_hf(gpt)
    assert not convert_alone(gpt, pinned().model_copy(update={"training": False})).modules


def test_a_model_in_torchs_ddp_trains_observes_and_exports_as_without():
    ids = tokens(batch=2)
    plain, gpt = build_gpt(dense()), build_gpt(dense())
    convert_alone(plain)
    wrapped: Any = Float16Module(gpt.config, DistributedDataParallel(gpt))
    convert_alone(wrapped)
    assert conversion_of(wrapped).modules == conversion_of(gpt).modules != {}
    observers = [QKVObserver(model) for model in (plain, wrapped)]
    for model in (plain, wrapped):
        losses(model, ids).float().mean().backward()
    for one, other in zip(plain.parameters(), gpt.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(observers[0].amax(), observers[1].amax())
    found = dict(export_hf(wrapped))
    assert all(torch.equal(found[name], tensor) for name, tensor in export_hf(plain))


def test_rows_that_pad_the_vocabulary_are_left_out_by_bridges_config():
    gpt = build_gpt(dense(vocab_size=128, tie_word_embeddings=False))
    gpt.config.vocab_size = 100  # the field of Megatron-Bridge's config; 128 rows with its padding
    exported = dict(export_hf(gpt))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert exported[name].shape == (100, 128)
        assert torch.equal(exported[name], dict(export_hf(gpt, vocab_size=128))[name][:100])
    other = build_gpt(dense(vocab_size=128, tie_word_embeddings=False), seed=1)
    with pytest.raises(CheckpointError, match="vocab_size where its vocabulary is padded"):
        load_hf(other, exported)
    other.config.vocab_size = 100
    load_hf(other, exported)
    assert torch.equal(other.output_layer.weight[:100], gpt.output_layer.weight[:100])
    assert not other.output_layer.weight[100:].any()

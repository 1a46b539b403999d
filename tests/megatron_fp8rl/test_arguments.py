"""Arguments that the public functions do not serve are refused in a sentence, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.module import Float16Module
from torch.nn.parallel import DistributedDataParallel

from fp8rl.errors import CheckpointError, Fp8RLError, RecipeError, ScaleError, UnsupportedError
from fp8rl.kv_scales import scale_name
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.kv_cache import KVCacheInTraining
from megatron_fp8rl.observers import QKVObserver
from megatron_fp8rl.router_replay import ReplayedRoutes
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import convert_alone, dense, losses, pinned, tokens

pytestmark = pytest.mark.usefixtures("mcore")

DOWN = "model.layers.0.mlp.down_proj.weight"
OF_A_MODEL: dict[str, Callable[[Any], Any]] = {
    "convert": convert_alone,
    "conversion_of": conversion_of,
    "export_hf": lambda model: list(export_hf(model)),
    "load_hf": lambda model: load_hf(model, dict(export_hf(build_gpt(dense())))),
    "QKVObserver": QKVObserver,
    "KVCacheInTraining": KVCacheInTraining,
    "ReplayedRoutes": ReplayedRoutes,
}


WRAPPERS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "DDP": DistributedDataParallel,
    "DDP of Float16Module": lambda gpt: DistributedDataParallel(Float16Module(gpt.config, gpt)),
    "Float16Module of DDP": lambda gpt: Float16Module(gpt.config, DistributedDataParallel(gpt)),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_model_in_torchs_ddp_trains_observes_and_exports_as_without(kind, moment):
    ids = tokens(batch=2)
    plain = build_gpt(dense())
    convert_alone(plain)
    gpt = build_gpt(dense())
    if moment == "before":
        convert_alone(gpt)
    wrapped = WRAPPERS[kind](gpt)
    if moment == "after":
        convert_alone(wrapped)
    assert conversion_of(wrapped).modules == conversion_of(gpt).modules != {}
    observers = [QKVObserver(model) for model in (plain, wrapped)]
    for model in (plain, wrapped):
        losses(model, ids).float().mean().backward()
    for one, other in zip(plain.parameters(), gpt.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(observers[0].amax(), observers[1].amax())
    found = dict(export_hf(wrapped))
    for name, tensor in export_hf(plain):
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("function", OF_A_MODEL)
@pytest.mark.parametrize(
    "make",
    [
        lambda gpt: None,
        lambda gpt: "model",
        lambda gpt: {"model": gpt},
        lambda gpt: (chunk for chunk in [gpt]),
        lambda gpt: [],
        lambda gpt: [None],
        lambda gpt: [[gpt]],
        lambda gpt: gpt.decoder,
        lambda gpt: torch.nn.ModuleList([gpt]),
        lambda gpt: torch.nn.DataParallel(gpt),
    ],
    ids=[
        *("None", "text", "dict", "generator", "empty", "of None", "nested", "decoder"),
        *("ModuleList", "DataParallel"),
    ],
)
def test_what_is_no_model_is_refused(function, make):
    given = make(build_gpt(dense()))
    with pytest.raises(UnsupportedError, match=r"GPTModel"):
        OF_A_MODEL[function](given)


@pytest.mark.parametrize("function", ["convert", "QKVObserver", "KVCacheInTraining", "export_hf"])
def test_two_models_are_no_chunks_of_one(function):
    models = [build_gpt(dense()) for _ in range(2)]
    with pytest.raises(Fp8RLError, match="twice"):
        OF_A_MODEL[function](models)


@pytest.mark.parametrize("function", ["export_hf", "QKVObserver", "KVCacheInTraining"])
def test_a_model_without_memory_has_nothing_to_read(function):
    with pytest.raises(UnsupportedError, match="meta device"):
        OF_A_MODEL[function](build_gpt(dense()).to("meta"))


class OfBridge(torch.nn.Module):
    """As Megatron-Bridge's AdapterWrapper, which is not installed here."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = linear, torch.nn.Linear(128, 4)


class OfPeft(torch.nn.Module):
    """As peft's LoraLayer, which is not installed here."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer, self.lora_A = linear, torch.nn.ModuleDict()


def _with_parameters(linear: torch.nn.Module) -> torch.nn.Module:
    linear.lora_A = torch.nn.Parameter(torch.zeros(4, 128))
    return linear


@pytest.mark.parametrize("adapter", [OfBridge, OfPeft, _with_parameters])
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


@pytest.mark.parametrize("size", [0, -1, 129, "100", 100.0, True, [100]])
def test_a_vocabulary_that_the_model_does_not_have(size):
    with pytest.raises(CheckpointError, match="is not within the model's 128"):
        export_hf(build_gpt(dense(vocab_size=128)), vocab_size=size)


@pytest.mark.parametrize("recipe", [None, {"training": True}, "recipe.yaml", 3])
def test_what_is_no_recipe(recipe):
    with pytest.raises(RecipeError, match=r"make one with Recipe\.load\(path\)"):
        convert(build_gpt(dense()), recipe)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (np.ones((128, 256), np.float32), "is a ndarray"),
        ("weight", "is a str"),
        (None, "is a NoneType"),
        (torch.ones(128, 256, dtype=torch.bfloat16, device="meta"), "is without values"),
        (torch.ones(128, 256, dtype=torch.bfloat16).to_sparse(), "is sparse"),
        (torch.ones(128, 256, dtype=torch.complex64), "is torch.complex64"),
    ],
)
def test_what_is_no_tensor_to_load(tensor, message):
    gpt = build_gpt(dense())
    before = dict(export_hf(gpt))
    with pytest.raises(CheckpointError, match=f"'{DOWN}' {message}"):
        load_hf(gpt, {**before, DOWN: tensor})
    assert all(torch.equal(tensor, before[name]) for name, tensor in export_hf(gpt))


@pytest.mark.parametrize("tensors", [None, "model.safetensors", 3])
def test_what_is_no_stream(tensors):
    gpt = build_gpt(dense())
    with pytest.raises(UnsupportedError, match="give pairs of name and tensor, or a mapping"):
        load_hf(gpt, tensors)
    with pytest.raises(UnsupportedError, match="give pairs of name and tensor, or a mapping"):
        list(fp8_wire(tensors, convert_alone(gpt).policy))


def test_codes_are_no_stream_to_quantize():
    gpt = build_gpt(dense())
    policy = convert_alone(gpt).policy
    wire = dict(fp8_wire(dict(export_hf(gpt)), policy))
    with pytest.raises(UnsupportedError, match=r"weight' holds torch\.float8_e4m3fn, which cannot"):
        list(fp8_wire(wire, policy))
    with pytest.raises(UnsupportedError, match=f"'{DOWN}' is no torch.Tensor"):
        list(fp8_wire({DOWN: np.ones((128, 256))}, policy))
    with pytest.raises(UnsupportedError, match="The policy is a Recipe"):
        list(fp8_wire(wire, pinned()))


@pytest.mark.parametrize("dtype", ["fp8", "int8", "fp8_e5m2", None, 3, torch.int8])
def test_a_cache_of_another_dtype(dtype):
    """Naively anything but fp8_e4m3 was INT8."""
    with pytest.raises(UnsupportedError, match="There is no KV cache of dtype"):
        KVCacheInTraining(build_gpt(dense()), dtype)


@pytest.mark.parametrize("value", ["1", None, True, [1.0], b"1"])
def test_a_scale_that_is_no_number(value):
    cache = KVCacheInTraining(build_gpt(dense()))
    scales: dict[Any, Any] = {scale_name(layer, role): 1.0 for layer in range(2) for role in "kv"}
    with pytest.raises(ScaleError, match=r"layers\.1\.self_attn\.k_scale' is a "):
        cache.set({**scales, scale_name(1, "k"): value})
    with pytest.raises(ScaleError, match="give a mapping from name to scale"):
        cache.set(list(scales.values()))
    assert not cache.in_service
    cache.set({**scales, 3: 1.0})  # other entries are left out


@pytest.mark.parametrize("state", [None, [], {}, {"amax": 1}, {"counts": torch.zeros(1)}])
def test_a_state_of_no_observer(state):
    with pytest.raises(CheckpointError, match="it needs 'amax' alone"):
        QKVObserver(build_gpt(dense())).load_state_dict(state)

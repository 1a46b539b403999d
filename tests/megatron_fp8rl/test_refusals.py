"""What is not served is refused in a sentence, by name, before anything changes."""

from __future__ import annotations

from collections.abc import Callable
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
from megatron_fp8rl import conversion_of, convert, weight_codes_hf
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.kv.cache import KVCacheInTraining
from megatron_fp8rl.kv.observers import QKVObserver
from megatron_fp8rl.layers.linear import Fp8Module
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


STREAM = "give pairs of name and tensor, or a mapping"
CALLS: list[tuple[Callable[[Any], object], type[Exception], str]] = [
    (lambda gpt: convert_alone(torch.nn.Linear(2, 2)), UnsupportedError, "GPTModel"),
    (lambda gpt: convert_alone(gpt, pinned(layers=(7,))), PinError, "7 matches nothing"),
    (
        lambda gpt: convert_alone(gpt, gemm_backend="fast"),
        UnsupportedError,
        "no GEMM backend 'fast'",
    ),
    (
        lambda gpt: weight_codes_hf(gpt.decoder.layers[0].mlp.linear_fc1),
        UnsupportedError,
        "has no FP8 codes",
    ),
    *(
        (
            lambda gpt, size=size: export_hf(gpt, vocab_size=size),
            CheckpointError,
            "is not within the model's",
        )
        for size in (0, -1, 10_000, "100", 100.0, True, [100])
    ),
    *(
        (
            lambda gpt, recipe=recipe: convert(gpt, recipe),
            RecipeError,
            r"make one with Recipe\.load\(path\)",
        )
        for recipe in (None, {"training": True}, "recipe.yaml", 3)
    ),
    *(
        (with_tensor(tensor), CheckpointError, f"'{DOWN}' {message}")
        for tensor, message in (
            (np.ones((128, 256), np.float32), "is a ndarray"),
            ("weight", "is a str"),
            (None, "is a NoneType"),
            (torch.ones(128, 256, dtype=torch.bfloat16, device="meta"), "is without values"),
            (torch.ones(128, 256, dtype=torch.bfloat16).to_sparse(), "is sparse"),
            (torch.ones(128, 256, dtype=torch.complex64), "is torch.complex64"),
        )
    ),
    *(
        (lambda gpt, tensors=tensors: load_hf(gpt, tensors), UnsupportedError, STREAM)
        for tensors in (None, "model.safetensors", 3)
    ),
    *(
        (
            lambda gpt, tensors=tensors: list(fp8_wire(tensors, convert_alone(gpt).policy)),
            UnsupportedError,
            STREAM,
        )
        for tensors in (None, "model.safetensors", 3)
    ),
    (quantize_codes_again, UnsupportedError, r"weight' holds torch\.float8_e4m3fn, which cannot"),
    (
        lambda gpt: list(fp8_wire({DOWN: np.ones((128, 256))}, convert_alone(gpt).policy)),
        UnsupportedError,
        f"'{DOWN}' is no torch.Tensor",
    ),
    (
        lambda gpt: list(fp8_wire({}, pinned())),
        UnsupportedError,
        "The policy is a Recipe",
    ),
    *(  # naively anything but fp8_e4m3 was INT8
        (
            lambda gpt, dtype=dtype: KVCacheInTraining(gpt, dtype),
            UnsupportedError,
            "There is no KV cache of dtype",
        )
        for dtype in ("fp8", "int8", "fp8_e5m2", None, 3, torch.int8)
    ),
    *(
        (
            scales_of({**SCALES, scale_name(1, "k"): value}),
            ScaleError,
            r"layers\.1\.self_attn\.k_scale' is a ",
        )
        for value in ("1", None, True, [1.0], b"1")
    ),
    (scales_of(list(SCALES.values())), ScaleError, "give a mapping from name to scale"),
    *(
        (
            lambda gpt, state=state: QKVObserver(gpt).load_state_dict(state),
            CheckpointError,
            "it needs 'amax' alone",
        )
        for state in (None, [], {}, {"amax": 1}, {"counts": torch.zeros(1)})
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_refused(call: Callable[[Any], object], error: type[Exception], message: str) -> None:
    gpt = build_gpt(dense())
    before = {name: tensor.clone() for name, tensor in gpt.named_parameters()}
    with pytest.raises(error, match=message):
        call(gpt)
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt.named_parameters())


def test_entries_that_are_no_scales_of_this_model_are_left_out() -> None:
    cache = KVCacheInTraining(build_gpt(dense()))
    cache.set({**SCALES, 3: 1.0})
    assert cache.in_service


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


def _break(**attributes: Any) -> Callable[[Any], None]:
    def change(gpt: Any) -> None:
        for name, value in attributes.items():
            setattr(gpt.config, name, value)

    return change


def _te_like(gpt: Any) -> None:
    class TELinear(ColumnParallelLinear):
        pass

    gpt.decoder.layers[1].mlp.linear_fc1.__class__ = TELinear


def _few_groups(gpt: Any) -> None:
    gpt.decoder.layers[1].self_attention.world_size = 4


def _other_head_dim(gpt: Any) -> None:
    gpt.decoder.layers[1].self_attention.hidden_size_per_attention_head = 32


def _latent(gpt: Any) -> None:
    gpt.decoder.layers[1].mlp.latent = torch.nn.Linear(4, 4)


def _fsdp(gpt: Any) -> None:
    gpt.decoder.layers[1].mlp.linear_fc2.weight.__fsdp_param__ = True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_break(fp8="e4m3"), r"config\.fp8='e4m3'"),
        (_break(enable_autocast=True), "enable_autocast"),
        (_break(tp_comm_overlap=True), "tp_comm_overlap=True: user buffers"),
        (_break(cuda_graph_impl="local"), "cuda_graph_impl='local': a replayed graph"),
        (_break(enable_cuda_graph=True), "enable_cuda_graph=True: a replayed graph"),
        (_break(external_cuda_graph=True), "external_cuda_graph=True: a replayed graph"),
        (_break(delay_wgrad_compute=True), "delay_wgrad_compute=True: FP8 linears compute"),
        (_break(fp4="e2m1"), r"config\.fp4='e2m1': megatron's own FP4"),
        (_break(experimental_attention_variant="dsa"), "variant='dsa': its linear layers are"),
        (_break(cache_mla_latents=True), "cache_mla_latents=True: absorption"),
        (_break(mla_down_proj_fusion=True), "mla_down_proj_fusion=True: two HF matrices"),
        (_break(heterogeneous_block_specs=True), "heterogeneous_block_specs=True: its layers"),
        (_break(moe_latent_size=64), "moe_latent_size=64: latent projections"),
        (_fsdp, r"linear_fc2' is sharded by Megatron-FSDP"),
        (_te_like, r"decoder\.layers\.1\.mlp\.linear_fc1' is a TELinear"),
        (_few_groups, r"linear_qkv' spreads one query group over several ranks \(2 groups, TP 4\)"),
        (_other_head_dim, r"linear_qkv' has 512 rows where its config says 256"),
        (_latent, r"decoder\.layers\.1\.mlp\.latent\.weight' belongs to a Linear"),
    ],
)
def test_what_is_not_served_is_named(change, message):
    gpt = build_gpt(SERVED)
    change(gpt)
    classes = [type(m) for m in gpt.modules()]
    with pytest.raises(UnsupportedError, match=message):
        convert_alone(gpt)
    assert [type(m) for m in gpt.modules()] == classes
    assert not any(isinstance(m, Fp8Module) for m in gpt.modules())


def test_a_pinned_module_may_be_of_any_class():
    gpt = build_gpt(SERVED)
    _te_like(gpt)
    pins = pinned(names=("*.1.mlp.gate_proj", "*.1.mlp.up_proj"))
    assert len(convert_alone(gpt, pins).modules) == 7


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

"""Qwen3-MoE in live CPU engines: against transformers, through refits, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8rl import PinPolicy, Recipe
from fp8rl.errors import PinError, RefitError
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import quantize_block
from fp8rl.recipe import KVCache, Pins
from support.engine import PROMPTS as SHORT
from support.engine import Engine, in_fp8, load_tensors
from support.gaps import gap, noise_floor
from support.hf_reference import load_reference
from support.teacher_forced import FACTOR, PROMPTS, vllm_logprobs
from vllm_fp8rl.engine.rank_state import RankState, state_of
from vllm_fp8rl.refit import drop_requests, refit

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
PINNED = Recipe(kv_cache=KVCache(dtype="auto"), pins=Pins(kinds=("experts",)))
EXPERTS, WIDTH = 6, 192
"""Experts of 192 columns: gate and up lie in stacks of 256, and 64 of them are padding."""
LAYER = "model.layers.1.mlp.experts"
DOWN = f"{LAYER}.3.down_proj.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def paths(expert_checkpoints: dict[str, Path]) -> dict[str, Path]:
    return expert_checkpoints


@pytest.fixture(scope="module")
def a(paths: dict[str, Path]) -> Tensors:
    return load_tensors(paths["a"])


@pytest.fixture(scope="module")
def b(paths: dict[str, Path]) -> Tensors:
    return load_tensors(paths["b"])


@pytest.fixture(scope="module")
def started(moe_engine, shared_engine) -> Engine:
    return shared_engine("experts")


@pytest.fixture
def moe(started: Engine, a: Tensors) -> Iterator[Engine]:
    yield started
    drop_requests(started.llm)
    give(started, a)


@pytest.fixture(scope="module")
def tokens(started: Engine, a: Tensors, b: Tensors) -> dict[str, list[list[int]]]:
    """What the engine says after it was started from ``a``, and refitted with ``b`` and ``a``."""
    said = {"a": started.greedy(SHORT)}
    give(started, b)
    said["b"] = started.greedy(SHORT)
    give(started, a)
    assert started.greedy(SHORT) == said["a"] != said["b"]
    return said


def give(engine: Engine, tensors: Tensors) -> None:
    refit(engine.llm, tensors.items(), expect_kv_scales=False)


def experts_of(engine: Engine, layer: int = 1):
    return engine.model.get_submodule(f"model.layers.{layer}.mlp.experts.routed_experts")


def bytes_of(engine: Engine) -> dict[str, torch.Tensor]:
    layer = experts_of(engine)
    return {name: p.data.view(torch.uint8).clone() for name, p in layer.named_parameters()}


def fused(tensors: Tensors) -> Tensors:
    """With transformers' own tensors of all experts in one."""
    wire = {n: t for n, t in tensors.items() if ".experts." not in n}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stack(leaf: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([tensors[f"{prefix}.{e}.{leaf}.weight"] for e in range(EXPERTS)])

        wire[f"{prefix}.gate_up_proj"] = torch.cat([stack("gate_proj"), stack("up_proj")], 1)
        wire[f"{prefix}.down_proj"] = stack("down_proj")
    return wire


def test_equals_transformers_before_and_after_a_refit(
    moe: Engine, paths: dict[str, Path], a: Tensors, b: Tensors
) -> None:
    for name, tensors in (("a", a), ("b", b)):
        give(moe, tensors)
        actual, floor = vllm_logprobs(moe), noise_floor(paths[name], RECIPE, PROMPTS)
        found = gap(actual, load_reference(paths[name], RECIPE).many(PROMPTS))
        assert found.within(floor, FACTOR), (name, found, floor)
    for what, wrong in {
        "experts of one layer not quantized": ["model.layers.1.mlp.experts"],
        "one linear not quantized": ["model.layers.1.self_attn.o_proj"],
    }.items():
        reference = load_reference(paths["b"], RECIPE, unquantized=wrong)
        found = gap(actual, reference.many(PROMPTS))
        assert found.mean > FACTOR * floor.mean, (what, found, floor)
        assert found.flipped > FACTOR * floor.flipped, (what, found, floor)


def test_live_codes_are_those_of_the_contract(moe: Engine, a: Tensors) -> None:
    layer = experts_of(moe)
    assert layer.w13_weight.shape == (EXPERTS, 512, 256)
    for expert in range(EXPERTS):
        parts = {
            leaf: a[f"model.layers.1.mlp.experts.{expert}.{leaf}.weight"]
            for leaf in ("gate_proj", "up_proj", "down_proj")
        }
        gate, up, down = (quantize_block(part) for part in parts.values())
        live = layer.w13_weight[expert].view(torch.uint8)
        for first, wanted in ((0, gate), (256, up)):
            assert torch.equal(live[first : first + WIDTH], wanted.codes.view(torch.uint8))
            assert not live[first + WIDTH : first + 256].any()
        scales = torch.cat([gate.scale_inv, up.scale_inv])
        assert torch.equal(layer.w13_weight_scale_inv[expert], scales)
        live = layer.w2_weight[expert].view(torch.uint8)
        assert torch.equal(live[:, :WIDTH], down.codes.view(torch.uint8))
        assert not live[:, WIDTH:].any()
        assert torch.equal(layer.w2_weight_scale_inv[expert], down.scale_inv)


def test_scales_of_codes_and_routers_are_missed(moe: Engine, b: Tensors) -> None:
    wire = in_fp8(b)
    for missing in (f"{DOWN}_scale_inv", "model.layers.0.mlp.gate.weight"):
        with pytest.raises(RefitError, match=f"lacks 1 .*'{missing}'"):
            give(moe, {n: t for n, t in wire.items() if n != missing})
        with pytest.raises(RefitError, match="half-updated"):
            moe.greedy(SHORT)
        drop_requests(moe.llm)


def test_refused_before_anything_is_written(moe: Engine, tokens, b: Tensors) -> None:
    stacks = fused(b)
    down = "model.layers.1.mlp.experts.down_proj"
    for stream, message in (
        ({DOWN.replace("3", "9"): b[DOWN]}, "no tensor 'model.layers.1.mlp.experts.9"),
        ({DOWN: b[DOWN].t()}, r"shape \(192, 256\).*\(256, 192\)"),
        ({DOWN: b[DOWN], down: stacks[down]}, f"'{down}' arrived twice"),
        ({down: stacks[down], DOWN: b[DOWN]}, f"'{DOWN}' arrived twice"),
        ({down: quantize_block(b[DOWN]).codes.expand(EXPERTS, -1, -1)}, "dtype torch.float8"),
    ):
        with pytest.raises(RefitError, match=message):
            give(moe, stream)
    assert moe.greedy(SHORT) == tokens["a"]


def test_dummy_weights_then_a_refit(moe_engine, paths, tokens, b: Tensors) -> None:
    engine = moe_engine(paths["a"], RECIPE, load_format="dummy")
    layer = experts_of(engine)
    assert (layer.w2_weight_scale_inv > 0).all() and (layer.w13_weight_scale_inv > 0).all()
    assert layer.w2_weight.float().abs().sum() > 0
    assert not layer.w2_weight[:, :, WIDTH:].view(torch.uint8).any()
    assert not layer.w13_weight[:, WIDTH:256].view(torch.uint8).any()
    give(engine, b)
    assert engine.greedy(SHORT) == tokens["b"]


def test_pinned_experts_are_refitted_too(
    moe_engine, shared_engine, paths, a: Tensors, b: Tensors
) -> None:
    engine = shared_engine("experts in BF16")
    give(engine, b)
    assert experts_of(engine).w13_weight.dtype == torch.float32
    before = engine.pointers()
    said = [engine.greedy(SHORT)]
    for name, tensors in (("a", a), ("b", fused(b))):
        give(engine, tensors)
        said.append(engine.greedy(SHORT))
        if name == "b":
            continue
        # Of the recipe with more codes to flip: with fewer, a flip or two make the whole floor.
        actual, floor = vllm_logprobs(engine), noise_floor(paths[name], RECIPE, PROMPTS)
        found = gap(actual, load_reference(paths[name], PINNED).many(PROMPTS))
        assert found.within(floor, FACTOR), (name, found, floor)
        quantized = gap(actual, load_reference(paths[name], RECIPE).many(PROMPTS))
        assert not quantized.within(floor, FACTOR), (name, quantized, floor)
    assert said[0] == said[2] != said[1]
    assert engine.pointers() == before
    with pytest.raises(RefitError, match=f"'{DOWN}' has dtype torch.float8"):
        give(engine, {DOWN: quantize_block(a[DOWN]).codes})


def config(**changes) -> SimpleNamespace:
    shape = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 3,
        "moe_intermediate_size": 96,
        "intermediate_size": 100,
        "hidden_size": 256,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }
    return SimpleNamespace(**(shape | changes))


def resolved(**pins) -> RankState:
    recipe = Recipe(pins=Pins(**pins))
    spec = ModelSpec.of(config())
    return RankState(recipe, PinPolicy(recipe.pins, spec.names), spec, True, {}, None, None, None)


def test_pins_of_experts_are_all_or_none() -> None:
    name = "model.layers.1.mlp.experts"
    assert resolved().experts_precision(name) == "fp8"
    assert resolved(layers=(1,)).experts_precision(name) == "bf16"
    assert resolved(names=(f"{name}.*",)).experts_precision(name) == "bf16"
    assert resolved(kinds=("experts",)).experts_precision(name) == "bf16"
    with pytest.raises(PinError, match=r"experts.2.down_proj' but not all experts of its layer"):
        resolved(names=(f"{name}.2.down_proj",)).experts_precision(name)


@pytest.mark.parametrize("kind", ["experts", "experts in BF16"])
def test_fused_experts_of_another_number(moe_engine, shared_engine, a, b, kind):
    """Too few would write some of them; the first ones of too many would be taken."""
    engine = shared_engine(kind)
    before = bytes_of(engine)
    for leaf in ("gate_up_proj", "down_proj"):
        whole = fused(b)[f"{LAYER}.{leaf}"]
        for wrong in (whole[:-1], torch.cat([whole, whole])):
            with pytest.raises(RefitError, match=f"{leaf}' takes a tensor of shape"):
                engine.model.load_weights([(f"{LAYER}.{leaf}", wrong)])
    assert all(torch.equal(before[name], found) for name, found in bytes_of(engine).items())
    engine.model.load_weights(list(a.items()))
    assert not state_of(engine.model).guard.closed

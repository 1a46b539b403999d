"""Qwen3-MoE in live CPU engines: numerics, refits, routes that vLLM sees, and refusals."""

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
from fp8rl.recipe import Pins
from support.engine import PROMPTS as SHORT
from support.engine import Engine, in_fp8, load_tensors, same_state
from support.gaps import expected_and_floor, gap
from support.hf_reference import load_reference
from support.routes import RouteRecorder
from support.teacher_forced import FACTOR, PROMPTS, near_transformers, vllm_logprobs
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.moe import fused_moe
from vllm_fp8rl.refit import drop_requests, refit

EXPERTS, WIDTH = 6, 192
"""Experts of 192 columns: gate and up lie in stacks of 256, and 64 of them are padding."""
pytestmark = pytest.mark.usefixtures("experts_on_a_cpu")
STACK = "model.layers.1.mlp.experts"
DOWN = f"{STACK}.3.down_proj.weight"
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


@pytest.fixture
def moe(moe_engine, shared_engine) -> Iterator[Engine]:
    engine = shared_engine("experts")
    yield engine
    drop_requests(engine.llm)


def give(engine: Engine, tensors: Tensors) -> None:
    refit(engine.llm, tensors.items(), expect_kv_scales=False)


def experts_of(engine: Engine):
    return engine.model.get_submodule(f"{STACK}.routed_experts")


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


def test_equals_transformers_after_a_refit(moe, paths, b):
    give(moe, b)
    actual, floor = near_transformers(moe, paths["b"])
    for wrong in (STACK, "model.layers.1.self_attn.o_proj"):
        reference = load_reference(paths["b"], moe.recipe, unquantized=[wrong])
        found = gap(actual, reference.many(PROMPTS))
        assert found.mean > FACTOR * floor.mean, (wrong, found, floor)
        assert found.flipped > FACTOR * floor.flipped, (wrong, found, floor)


def test_live_codes_are_those_of_the_contract(moe, a):
    layer = experts_of(moe)
    assert layer.w13_weight.shape == (EXPERTS, 512, 256)
    for expert in range(EXPERTS):
        gate, up, down = (
            quantize_block(a[f"{STACK}.{expert}.{leaf}_proj.weight"])
            for leaf in ("gate", "up", "down")
        )
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


def test_scales_of_codes_and_routers_are_missed(moe, b):
    wire = in_fp8(b)
    for missing in (f"{DOWN}_scale_inv", "model.layers.0.mlp.gate.weight"):
        with pytest.raises(RefitError, match=f"lacks 1 .*'{missing}'"):
            give(moe, {n: t for n, t in wire.items() if n != missing})
        moe.refuses(RefitError, "half-updated")


def test_refused_before_anything_is_written(moe, b):
    """Too few fused experts would write some of them; the first of too many would be taken."""
    before, down = moe.state(), f"{STACK}.down_proj"
    whole = fused(b)[down]
    for stream, message in (
        ({DOWN.replace("3", "9"): b[DOWN]}, f"no tensor '{STACK}.9"),
        ({DOWN: b[DOWN].t()}, r"shape \(192, 256\).*\(256, 192\)"),
        ({DOWN: b[DOWN], down: whole}, f"'{down}' arrived twice"),
        ({down: whole, DOWN: b[DOWN]}, f"'{DOWN}' arrived twice"),
        ({down: quantize_block(b[DOWN]).codes.expand(EXPERTS, -1, -1)}, "dtype torch.float8"),
    ):
        with pytest.raises(RefitError, match=message):
            give(moe, stream)
    for wrong in (whole[:-1], torch.cat([whole, whole])):
        with pytest.raises(RefitError, match="down_proj' takes a tensor of shape"):
            moe.model.load_weights([(down, wrong)])
    assert same_state(moe.state(), before)


def test_dummy_weights_then_a_refit(moe, moe_engine, paths, b):
    engine = moe_engine(paths["a"], moe.recipe, load_format="dummy")
    layer = experts_of(engine)
    assert (layer.w2_weight_scale_inv > 0).all() and (layer.w13_weight_scale_inv > 0).all()
    assert not layer.w2_weight[:, :, WIDTH:].view(torch.uint8).any()
    for each in (engine, moe):
        give(each, b)
    assert engine.greedy(SHORT) == moe.greedy(SHORT)


def test_pinned_experts_are_refitted_too(moe_engine, shared_engine, paths, a, b):
    engine = shared_engine("experts in BF16")
    assert experts_of(engine).w13_weight.dtype == torch.float32
    before, said = engine.pointers(), engine.greedy(SHORT)
    give(engine, fused(b))
    # The floor of a recipe with more codes to flip: with fewer, a flip or two are all of it.
    quantized, floor = expected_and_floor(paths["b"], Recipe(), PROMPTS)
    actual = vllm_logprobs(engine)
    found = gap(actual, load_reference(paths["b"], engine.recipe).many(PROMPTS))
    assert found.within(floor, FACTOR), (found, floor)
    assert not gap(actual, quantized).within(floor, FACTOR)
    give(engine, a)
    assert engine.greedy(SHORT) == said and engine.pointers() == before
    with pytest.raises(RefitError, match=f"'{DOWN}' has dtype torch.float8"):
        give(engine, {DOWN: quantize_block(a[DOWN]).codes})


# Router replay: vLLM sees the routes of our experts and returns them.

PROMPT = list(range(20, 60))


def chosen_by_the_gates(engine: Engine) -> torch.Tensor:
    """``[tokens, layers, top-k]``, sorted, from the logits that the gates give for a prompt."""
    logits: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    handles = [
        engine.model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(
            lambda gate, args, output, layer=layer: logits[layer].append(output[0].clone())
        )
        for layer in (0, 1)
    ]
    engine.greedy([PROMPT], 8)
    for handle in handles:
        handle.remove()
    rows = [torch.cat(found).topk(2, dim=-1).indices for found in logits.values()]
    return torch.stack(rows, dim=1).sort(dim=-1).values


@pytest.mark.parametrize("kind", ["experts", "experts in BF16"])
def test_the_router_is_seen_before_and_after_a_refit(moe_engine, shared_engine, a, b, kind):
    engine = shared_engine(kind)
    recorder = RouteRecorder(engine.model)
    routes = []
    for tensors in (a, b, a):
        give(engine, tensors)
        expected = chosen_by_the_gates(engine)
        routes.append(recorder.take())
        assert torch.equal(routes[-1].sort(dim=-1).values, expected)
    assert routes[0].shape == (len(PROMPT) + 8 - 1, 2, 2)
    assert torch.equal(routes[0], routes[2]) and not torch.equal(routes[0], routes[1])


def test_routes_are_those_of_the_quantized_model(moe, paths):
    """Transformers, with the weights and activations that the recipe quantizes."""
    recorder = RouteRecorder(moe.model)
    (answer,) = moe.greedy([PROMPT], 8)
    found = recorder.take().sort(dim=-1).values
    logits: list[torch.Tensor] = []
    reference = load_reference(paths["a"], moe.recipe)
    for name, module in reference.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda gate, args, output: logits.append(output[0]))
    reference.many([[*PROMPT, *answer[:-1]]])
    expected = torch.stack([x.topk(2).indices for x in logits], dim=1).sort(dim=-1).values
    equal = (found == expected).all(dim=-1).float().mean()
    assert equal > 0.95, equal  # a flipped code may flip a near tie


def test_a_kernel_that_hides_the_router_is_refused():
    """As FlashInfer's TRT-LLM kernel, which takes router logits."""
    hides = type("Hides", (fused_moe.mk.FusedMoEExpertsMonolithic,), {})
    moe = SimpleNamespace(moe_backend="auto")
    reason = fused_moe._kernel_reason(hides, moe, None, None)
    assert "hides the routes that router replay needs" in str(reason)


def test_pins_of_experts_are_all_or_none():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 3}
    config |= {"moe_intermediate_size": 96, "hidden_size": 256, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "intermediate_size": 100, "decoder_sparse_step": 1}

    def precision(**pins) -> str:
        recipe, spec = Recipe(pins=Pins(**pins)), ModelSpec.of(config)
        policy = PinPolicy(recipe.pins, spec.names)
        state = RankState(recipe, policy, spec, True, {}, None, None, None)
        return state.experts_precision(STACK)

    assert precision() == "fp8"
    for pins in ({"layers": (1,)}, {"names": (f"{STACK}.*",)}, {"kinds": ("experts",)}):
        assert precision(**pins) == "bf16"
    with pytest.raises(PinError, match=r"experts.2.down_proj' but not all experts of its layer"):
        precision(names=(f"{STACK}.2.down_proj",))

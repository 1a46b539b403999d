"""Qwen3-MoE in live CPU engines: numerics, refits, routes that vLLM sees, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.numerics import quantize_block
from support.copies import with_fused_experts
from support.engine import PROMPTS as SHORT
from support.engine import Engine, load_tensors, same_state
from support.gaps import expected_and_floor, gap
from support.hf_reference import load_reference
from support.teacher_forced import FACTOR, PROMPTS, near_transformers, vllm_logprobs
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


def test_equals_transformers_after_a_refit(moe, paths, b):
    give(moe, b)
    actual, floor = near_transformers(moe, paths["b"])
    for wrong in (STACK, "model.layers.1.self_attn.o_proj"):
        reference = load_reference(paths["b"], moe.recipe, unquantized=[wrong])
        found = gap(actual, reference.many(PROMPTS))
        assert found.mean > FACTOR * floor.mean, (wrong, found, floor)
        assert found.flipped > FACTOR * floor.flipped, (wrong, found, floor)


def test_refused_before_anything_is_written(moe, b):
    """Too few fused experts would write some of them; the first of too many would be taken."""
    before, down = moe.state(), f"{STACK}.down_proj"
    whole = with_fused_experts(b)[down]
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
    assert not layer.w2_weight[:, :, WIDTH:].view(torch.uint8).any()  # padding
    for each in (engine, moe):
        give(each, b)
    assert engine.greedy(SHORT) == moe.greedy(SHORT)


def test_pinned_experts_are_refitted_too(moe_engine, shared_engine, paths, a, b):
    engine = shared_engine("experts in BF16")
    assert experts_of(engine).w13_weight.dtype == torch.float32
    before, said = engine.pointers(), engine.greedy(SHORT)
    give(engine, with_fused_experts(b))
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


class Recorder:
    """The experts of every token, by the function that vLLM's own capturer needs Triton for."""

    def __init__(self, model: torch.nn.Module) -> None:
        # vLLM has it from 0.28 on, and experts on a CPU from 0.30 on.
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        self.chosen: dict[int, list[torch.Tensor]] = {}
        bind_routed_experts_capturer(model, self)  # type: ignore[arg-type]

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep one forward's experts of one layer; vLLM's routers call it."""
        self.chosen.setdefault(layer_id, []).append(topk_ids.to(torch.int64, copy=True))

    def take(self) -> torch.Tensor:
        """Return the experts since the last call, int64 ``[tokens, MoE layers, top-k]``."""
        layers = [torch.cat(chosen) for _, chosen in sorted(self.chosen.items())]
        self.chosen.clear()
        return torch.stack(layers, dim=1)


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
    recorder = Recorder(engine.model)
    routes = []
    for tensors in (a, b, a):
        give(engine, tensors)
        expected = chosen_by_the_gates(engine)
        routes.append(recorder.take())
        assert torch.equal(routes[-1].sort(dim=-1).values, expected)
    assert routes[0].shape == (len(PROMPT) + 8 - 1, 2, 2)
    assert torch.equal(routes[0], routes[2]) and not torch.equal(routes[0], routes[1])

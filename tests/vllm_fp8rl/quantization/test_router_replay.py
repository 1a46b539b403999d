"""vLLM sees the routes of our experts in live CPU engines, FP8 and BF16, and returns them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.engine import Engine, load_tensors
from support.hf_reference import load_reference
from support.routes import RouteRecorder
from vllm_fp8rl.refit import refit

pytestmark = pytest.mark.usefixtures("experts_on_a_cpu")

LAYERS, EXPERTS, TOPK = 2, 6, 2
PROMPT, TOKENS = list(range(20, 60)), 8
FP8 = Recipe(kv_cache=KVCache(dtype="auto"))


@pytest.fixture(scope="module")
def paths(expert_checkpoints: dict[str, Path]) -> list[Path]:
    return list(expert_checkpoints.values())


def generate(engine: Engine) -> tuple[list[int], Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    (output,) = engine.llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    return [*PROMPT, *output.outputs[0].token_ids], output.outputs[0].routed_experts


def chosen_by_the_gates(engine: Engine, run: Callable[[], Any]) -> torch.Tensor:
    """``[tokens, layers, top-k]``, sorted, from the logits that the engine's gates give."""
    logits: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(LAYERS)}
    handles = [
        engine.model.get_submodule(f"model.layers.{layer}.mlp.gate").register_forward_hook(
            lambda gate, args, output, layer=layer: logits[layer].append(output[0].clone())
        )
        for layer in range(LAYERS)
    ]
    run()
    for handle in handles:
        handle.remove()
    rows = [torch.cat(found).topk(TOPK, dim=-1).indices for found in logits.values()]
    return torch.stack(rows, dim=1).sort(dim=-1).values


@pytest.mark.parametrize("kind", ["experts", "experts in BF16"])
def test_the_router_is_seen_before_and_after_a_refit(
    moe_engine, shared_engine, paths: list[Path], kind: str
) -> None:
    engine = shared_engine(kind)
    recorder = RouteRecorder(engine.model)
    routes = []
    for path in (*paths, paths[0]):
        refit(engine.llm, load_tensors(path).items(), expect_kv_scales=False)
        expected = chosen_by_the_gates(engine, lambda: generate(engine))
        found = recorder.take()
        assert found.shape == (len(PROMPT) + TOKENS - 1, LAYERS, TOPK)
        assert torch.equal(found.sort(dim=-1).values, expected)
        routes.append(found)
    assert not torch.equal(routes[0], routes[1])
    assert torch.equal(routes[0], routes[2])


def test_routes_are_those_of_the_quantized_model(moe_engine, shared_engine, paths) -> None:
    """Transformers, with the weights and activations that the recipe quantizes."""
    engine = shared_engine("experts")
    recorder = RouteRecorder(engine.model)
    tokens, _ = generate(engine)
    found = recorder.take().sort(dim=-1).values
    logits: list[torch.Tensor] = []
    reference = load_reference(paths[0], FP8)
    for name, module in reference.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda gate, args, output: logits.append(output[0]))
    reference.many([tokens[:-1]])
    expected = torch.stack([x.topk(TOPK).indices for x in logits], dim=1).sort(dim=-1).values
    equal = (found == expected).all(dim=-1).float().mean()
    assert equal > 0.95, equal  # a flipped code may flip a near tie


def test_a_kernel_that_hides_the_router_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_fp8rl.kernels.moe import fused_moe

    class Hides(fused_moe.mk.FusedMoEExpertsMonolithic):
        """As FlashInfer's TRT-LLM kernel, which takes router logits."""

    moe = SimpleNamespace(moe_backend="auto")
    assert "hides the routes that router replay needs" in str(
        fused_moe._kernel_reason(Hides, moe, None, None)
    )

"""Multi-latent attention and DeepSeek's experts in live CPU engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention import MLAAttention

from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from support.engine import Engine, load_tensors
from support.gaps import gap
from support.hf_reference import load_reference
from support.mla import ALL, ON_A_CPU, PUBLISHED, RECIPE, SHAPES
from support.sampled import sampled
from support.teacher_forced import FACTOR, PROMPTS, near_transformers
from support.tiny import make_mla_checkpoint
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.engine.sleep import discardable
from vllm_fp8rl.quantization.mla import Fp8RLMLAMethod, check_cpu, check_latent_cache
from vllm_fp8rl.refit import refit

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CASES = {"moonlight": RECIPE, "v3": ALL, "v2": PUBLISHED}
"""The recipe of the engine of each shape."""
SOME = PROMPTS[:32]


@dataclass(frozen=True)
class Case:
    name: str
    engine: Engine
    paths: dict[str, Path]

    def give(self, name: str) -> None:
        refit(self.engine.llm, load_tensors(self.paths[name]).items(), expect_kv_scales=False)

    def parts(self) -> list[torch.Tensor]:
        """What decoding multiplies with in place of kv_b_proj."""
        layers: list[Any] = [m for m in self.engine.model.modules() if isinstance(m, MLAAttention)]
        return [part for layer in layers for part in (layer.W_UK_T, layer.W_UV)]


@pytest.fixture(
    scope="module",
    # test_families.py runs a shape with q_lora_rank among the quick tests.
    params=["moonlight", *(pytest.param(name, marks=pytest.mark.slow) for name in ("v3", "v2"))],
)
def case(
    request: pytest.FixtureRequest,
    experts_on_a_cpu: None,
    moe_engine: Callable[..., Engine],
    tmp_path_factory: pytest.TempPathFactory,
) -> Case:
    root, shape = tmp_path_factory.mktemp(request.param), SHAPES[request.param]
    paths = {
        name: make_mla_checkpoint(root / name, seed, **shape) for seed, name in enumerate("ab")
    }
    engine = moe_engine(paths["a"], CASES[request.param], **ON_A_CPU)
    return Case(request.param, engine, paths)


def decoded(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts with eight tokens that the engine added, and its logprobs of these."""
    found = sampled(engine.llm, SOME, [8] * len(SOME))
    return [tokens for tokens, _ in found], torch.cat([logprobs for _, logprobs in found])


def test_equals_transformers_after_a_refit(case):
    """Prefill and decode, which multiplies with two parts of kv_b_proj instead of the whole."""
    engine, recipe = case.engine, case.engine.recipe
    before = [*engine.pointers().values(), *(part.data_ptr() for part in case.parts())]
    first = decoded(engine)
    case.give("b")
    whole, logprobs = decoded(engine)
    assert whole != first[0]
    _, floor = near_transformers(engine, case.paths["b"])
    expected = load_reference(case.paths["b"], recipe).many(whole)
    found = gap(logprobs, expected.view(len(SOME), -1)[:, -8:].flatten())
    if recipe is ALL:  # decode does not quantize what it multiplies with kv_b_proj
        assert found.mean < 0.3, found
    else:
        assert found.within(floor, FACTOR), (found, floor)
    if case.name != "v2":  # whose router has no bias
        live = engine.model.get_parameter(BIAS)
        assert live.dtype == torch.float32
        assert torch.equal(live, load_tensors(case.paths["b"])[BIAS])
    case.give("a")
    again = decoded(engine)
    assert again[0] == first[0] and torch.equal(again[1], first[1])
    assert before == [*engine.pointers().values(), *(part.data_ptr() for part in case.parts())]


def test_a_refit_after_a_sleep_that_lost_the_weights(case):
    case.give("b")
    said = case.engine.greedy(PROMPTS[:8])
    guard = state_of(case.engine.model).guard
    guard.sleep(("weights",), dict(discardable(case.engine.model)))
    for part in case.parts():
        part.data.fill_(torch.nan)
    guard.wake(None)
    case.engine.refuses(RefitError, "discarded")
    case.give("b")
    assert case.engine.greedy(PROMPTS[:8]) == said


def layer(**changes: Any) -> None:
    """Build a layer with a backend and fields of vLLM's."""
    name = changes.pop("backend", "CPU_MLA")
    fields = {"kv_cache_dtype": "auto", "attn_backend": SimpleNamespace(get_name=lambda: name)}
    Fp8RLMLAMethod(None, None).create_weights(SimpleNamespace(**fields, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: check_latent_cache("fp8_ds_mla"), r"Set kv_cache\.dtype to 'auto'"),
        (lambda: check_latent_cache("int8_per_token_head"), "no KV cache of dtype 'int8_per_token"),
        (
            lambda: check_cpu(ModelSpec.of({"kv_lora_rank": 128, "qk_rope_head_dim": 32})),
            "is 160, but vLLM's MLA kernel for CPUs takes 576",
        ),
        (lambda: layer(backend="AMX_MLA"), "packs the weight of kv_b_proj"),
        (lambda: layer(dcp_q_replicate=True), "gathered copy of kv_b_proj"),
    ],
)
def test_what_no_cache_and_no_refit_serves(build, message):
    with pytest.raises(UnsupportedError, match=message):
        build()

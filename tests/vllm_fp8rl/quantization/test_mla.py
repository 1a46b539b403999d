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

from fp8rl import Recipe
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import dequantize_block, quantize_block
from fp8rl.recipe import KVCache
from support.engine import Engine, load_tensors
from support.gaps import gap, noise_floor
from support.hf_reference import load_reference
from support.mla import ALL, ON_A_CPU, PUBLISHED, RECIPE, SHAPES
from support.teacher_forced import FACTOR, PROMPTS, vllm_logprobs
from support.tiny import make_mla_checkpoint
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.engine.sleep import discardable
from vllm_fp8rl.quantization.mla import Fp8RLMLAMethod, check_cpu, check_latent_cache
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
CASES = {"moonlight": RECIPE, "v3": ALL, "v2": PUBLISHED}
"""The recipe of the engine of each shape."""


@dataclass(frozen=True)
class Case:
    name: str
    engine: Engine
    paths: dict[str, Path]

    def give(self, name: str) -> None:
        refit(self.engine.llm, self.tensors(name).items(), expect_kv_scales=False)

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        return load_tensors(self.paths[name])

    @property
    def attention(self) -> list[Any]:
        return [m for m in self.engine.model.modules() if isinstance(m, MLAAttention)]


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
    root = tmp_path_factory.mktemp(request.param)
    shape = SHAPES[request.param]
    paths = {
        name: make_mla_checkpoint(root / name, seed, **shape) for seed, name in enumerate("ab")
    }
    recipe = CASES[request.param]
    engine = moe_engine(paths["a"], recipe, **ON_A_CPU)
    return Case(request.param, engine, paths)


def decoded(engine: Engine) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts with eight tokens that the engine added, and its logprobs of these."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False
    )
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False
    )
    chosen = [output.outputs[0] for output in outputs]
    logprobs = [
        each.logprobs[i][token].logprob for each in chosen for i, token in enumerate(each.token_ids)
    ]
    whole = [prompt + list(each.token_ids) for prompt, each in zip(PROMPTS, chosen, strict=True)]
    return whole, torch.tensor(logprobs)


def last(logprobs: torch.Tensor) -> torch.Tensor:
    """Those of the eight tokens at the end of each prompt."""
    return logprobs.view(len(PROMPTS), -1)[:, -8:].flatten()


def test_equals_transformers_after_a_refit(case: Case) -> None:
    """Prefill and decode, which multiplies with two parts of kv_b_proj instead of the whole."""
    engine, recipe = case.engine, case.engine.recipe
    before, said = engine.pointers(), []
    for name in "ab":
        case.give(name)
        said.append(decoded(engine))
    whole, logprobs = said[-1]
    reference = load_reference(case.paths["b"], recipe)
    floor = noise_floor(case.paths["b"], recipe, PROMPTS)
    found = gap(vllm_logprobs(engine), reference.many(PROMPTS))
    assert found.within(floor, FACTOR), (found, floor)
    found = gap(logprobs, last(reference.many(whole)))
    if recipe is ALL:  # decode does not quantize what it multiplies with kv_b_proj
        assert found.mean < 0.3, found
    else:
        assert found.within(floor, FACTOR), (found, floor)
    case.give("a")
    whole, logprobs = decoded(engine)
    assert whole == said[0][0] != said[1][0]
    assert torch.equal(logprobs, said[0][1])
    assert engine.pointers() == before


def test_parts_of_kv_b_proj_follow_a_refit_in_place(case: Case) -> None:
    parts = [part for layer in case.attention for part in (layer.W_UK_T, layer.W_UV)]
    before = [part.data_ptr() for part in parts]
    case.give("b")
    case.engine.greedy([[5, 6, 7]], 1)
    assert [part.data_ptr() for part in parts] == before
    b = case.tensors("b")
    for number, layer in enumerate(case.attention):
        weight = b[f"model.layers.{number}.self_attn.kv_b_proj.weight"]
        if case.engine.recipe is ALL:
            weight = dequantize_block(*quantize_block(weight))
        by_head = weight.float().view(layer.num_heads, -1, layer.kv_lora_rank)
        up_k, up_v = by_head.split([layer.qk_nope_head_dim, layer.v_head_dim], dim=1)
        assert torch.equal(layer.W_UK_T, up_k)
        assert torch.equal(layer.W_UV, up_v.transpose(1, 2))


def test_the_bias_of_the_router_stays_in_float32(case: Case) -> None:
    if case.name == "v2":
        assert BIAS not in Inventory.of(case.engine.model).entries
        return
    case.give("b")
    live = case.engine.model.get_parameter(BIAS)
    assert live.dtype == torch.float32
    assert torch.equal(live, case.tensors("b")[BIAS])
    tensors = case.tensors("a")
    del tensors[BIAS]
    with pytest.raises(RefitError, match=f"lacks 1 .*'{BIAS}'"):
        refit(case.engine.llm, tensors.items(), expect_kv_scales=False)
    case.give("a")


def test_a_refit_after_a_sleep_that_lost_the_weights(case: Case) -> None:
    case.give("b")
    said = case.engine.greedy(PROMPTS[:8])
    guard = state_of(case.engine.model).guard
    guard.sleep(("weights",), dict(discardable(case.engine.model)))
    for layer in case.attention:
        layer.W_UK_T.data.fill_(torch.nan)
        layer.W_UV.data.fill_(torch.nan)
    guard.wake(None)
    case.engine.refuses(RefitError, "discarded")
    case.give("b")
    assert case.engine.greedy(PROMPTS[:8]) == said


# What is refused.


@pytest.mark.usefixtures("experts_on_a_cpu")
def test_an_fp8_latent_cache_is_refused(moe_engine, tmp_path: Path) -> None:
    path = make_mla_checkpoint(tmp_path / "a", 0, num_hidden_layers=2)
    with pytest.raises(UnsupportedError, match="absorbed query with one scale that no trainer"):
        moe_engine(path, Recipe(kv_cache=KVCache()), **ON_A_CPU)
    with pytest.raises(UnsupportedError, match=r"custom_ops': \['-rotary_embedding'\]"):
        moe_engine(path, RECIPE)
    for dtype in ("fp8", "fp8_e4m3", "fp8_ds_mla"):
        with pytest.raises(UnsupportedError, match=r"Set kv_cache\.dtype to 'auto'"):
            check_latent_cache(dtype)
    with pytest.raises(UnsupportedError, match="no KV cache of dtype 'int8_per_token_head'"):
        check_latent_cache("int8_per_token_head")


def test_a_latent_that_the_kernel_does_not_take() -> None:
    with pytest.raises(UnsupportedError, match="is 160, but vLLM's MLA kernel for CPUs takes 576"):
        check_cpu(ModelSpec.of({"kv_lora_rank": 128, "qk_rope_head_dim": 32}))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"backend": "AMX_MLA"}, "packs the weight of kv_b_proj"),
        ({"dcp_q_replicate": True}, "gathered copy of kv_b_proj"),
    ],
)
def test_copies_that_no_refit_reaches(layer: dict[str, Any], message: str) -> None:
    backend = SimpleNamespace(get_name=lambda: layer.get("backend", "CPU_MLA"))
    fields = {"kv_cache_dtype": "auto", "attn_backend": backend, **layer}
    with pytest.raises(UnsupportedError, match=message):
        Fp8RLMLAMethod(None, None).create_weights(SimpleNamespace(**fields))  # type: ignore[arg-type]

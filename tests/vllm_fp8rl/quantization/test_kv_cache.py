"""KV scales of a live engine: loaded by name, validated, in effect at once, kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.kv_scales import scale_name
from support.engine import SCALES, Engine, set_threads
from vllm_fp8rl.calibration import set_uncalibrated_kv_scales
from vllm_fp8rl.kv.scales import kv_scale_state, missing_kv_scales, set_kv_scales
from vllm_fp8rl.quantization.checks import check_scale_source, check_speculation
from vllm_fp8rl.refit import drop_requests, refit

K0, V0 = (scale_name(0, role) for role in ("k", "v"))
PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22]]


def copies(model: Any, layer: int, role: str) -> set[float]:
    """Every place from which some attention backend reads a scale."""
    attention = model.model.layers[layer].self_attn.attn
    live, number = getattr(attention, f"_{role}_scale"), getattr(attention, f"_{role}_scale_float")
    host = getattr(attention, f"_{role}_scale_cpu", live)
    return {getattr(attention, f"{role}_scale").item(), live.item(), number, host.item()}


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.fixture
def model(engine: Engine) -> Iterator[torch.nn.Module]:
    """The session's model; its scales are put back afterwards."""
    before = kv_scale_state(engine.model)
    yield engine.model
    set_kv_scales(engine.model, {scale_name(*key): value for key, value in before.items()})
    engine.llm.reset_prefix_cache()


def test_survive_a_reload(engine, model, a):
    set_kv_scales(model, {K0: 0.2, V0: 0.3})
    expected = kv_scale_state(model)
    pointers = {n: t.data_ptr() for n, t in model.state_dict().items() if n.endswith("_scale")}
    sent = {(layer, role): 0.6 + layer / 10 for layer in (0, 1) for role in ("k", "v")}
    for scales in ({}, sent):
        stream = [*a.items(), *((scale_name(*k), torch.tensor([v])) for k, v in scales.items())]
        expected |= {key: f32(value) for key, value in scales.items()}
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
        assert kv_scale_state(model) == expected
        for (layer, role), value in expected.items():
            assert copies(model, layer, role) == {value}
    after = {n: t.data_ptr() for n, t in model.state_dict().items() if n.endswith("_scale")}
    assert after == pointers
    set_kv_scales(model, {K0: 0.8})  # the loaders still reach the live layer
    assert copies(model, 0, "k") == {f32(0.8)}


def test_generation_is_refused_until_scales_are_set(engine, other_engine, checkpoints, a):
    fresh = other_engine(checkpoints["a"], Recipe(), scaled=False, load_format="dummy")
    model = fresh.model
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter.float()).all() or "attn.attn" in name, name
        if name.endswith("weight_scale_inv"):
            assert (parameter > 0).all() and parameter.max() < 1e-3, name  # drawn from +-1e-3
    required = [scale_name(layer, role) for layer in (0, 1) for role in "kv"]
    assert kv_scale_state(model) == {}  # whatever the dummy loader drew
    assert missing_kv_scales(model) == required
    assert copies(model, 0, "k") == {1.0}  # a placeholder, see below

    message = r"'model\.layers\.0\.self_attn\.k_scale' was never loaded \(4 missing\)"
    with pytest.raises(ScaleError, match=message + ".*set_uncalibrated_kv_scales") as refused:
        fresh.greedy(PROMPTS)
    drop_requests(fresh.llm)
    # The page quotes the beginning, of a model with twice as many layers.
    guide = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    told = guide.split("```text\nScaleError: ")[1].split("```")[0]
    assert str(refused.value).startswith(" ".join(told.split()).replace("(8 ", "(4 "))

    set_kv_scales(model, dict.fromkeys(required[:-1], 0.1))
    assert missing_kv_scales(model) == required[-1:]
    set_uncalibrated_kv_scales(model, 0.1)
    assert set(kv_scale_state(model).values()) == {f32(0.1)}
    assert len(fresh.greedy(PROMPTS)) == len(PROMPTS)  # of dummy weights, which a refit replaces
    refit(fresh.llm, (a | SCALES).items(), expect_kv_scales=True)
    assert fresh.greedy(PROMPTS) == engine.greedy(PROMPTS)


def test_without_an_fp8_cache_there_is_nothing_to_scale(shared_engine):
    plain = shared_engine("plain cache")
    assert kv_scale_state(plain.model) == {} and missing_kv_scales(plain.model) == []
    with pytest.raises(ScaleError, match="no FP8 KV cache"):
        set_uncalibrated_kv_scales(plain.model, 0.1)
    with pytest.raises(RefitError, match="announced, but the engine has no FP8 KV cache"):
        refit(plain.llm, [], expect_kv_scales=True)
    assert len(plain.greedy(PROMPTS)) == len(PROMPTS)


def drafts(method: str) -> SimpleNamespace:
    return SimpleNamespace(method=method)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (
            lambda: check_scale_source(SimpleNamespace(calculate_kv_scales=True)),
            r"calculate_kv_scales.*calibrate_kv_scales",
        ),
        (
            lambda: check_speculation("fp8_e4m3", drafts("draft_model")),
            r"'draft_model', .* without scales .*'fp8_e4m3'; se.*take the method 'ngram', w",
        ),
        (
            lambda: check_speculation("int8_per_token_head", drafts("of a later release")),
            "'of a later release'",
        ),
    ],
)
def test_caches_without_right_scales_are_refused(check, message):
    with pytest.raises(UnsupportedError, match=message):
        check()
    check_scale_source(SimpleNamespace())  # vLLM 0.32
    for dtype, method in (("auto", "draft_model"), ("fp8_e4m3", "ngram")):
        check_speculation(dtype, drafts(method))


@pytest.mark.slow  # numba compiles the proposer for 10 s
def test_drafts_from_the_prompt_give_the_tokens_of_an_engine_without(
    checkpoints, engine, other_engine
):
    """The proposer has no layers, and is what the refusal of a draft model names."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    start = {"speculative_config": drafts, "disable_log_stats": False}
    try:
        speculating = other_engine(checkpoints["a"], Recipe(), **start)
        prompts = [[7, 8, 9] * 4, [20, 21] * 5]
        assert speculating.greedy(prompts, 24) == engine.greedy(prompts, 24)
    finally:
        set_threads(1)  # the proposer leaves as many as there are cores
    drafted = "vllm:spec_decode_num_draft_tokens"
    assert next(each.value for each in speculating.llm.get_metrics() if each.name == drafted) > 0

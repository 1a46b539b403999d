"""KV scales of a live engine: loaded by name, validated, in effect at once, kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from fp8rl.kv_scales import scale_name
from support.engine import Engine, set_threads

pytest.importorskip("vllm")
from vllm_fp8rl.calibration import set_uncalibrated_kv_scales
from vllm_fp8rl.engine.guard import require_known_caches
from vllm_fp8rl.kv.scales import kv_scale_state, missing_kv_scales, set_kv_scales
from vllm_fp8rl.quantization.checks import (
    _check_kv_cache,
    check_scale_source,
    check_speculation,
)
from vllm_fp8rl.refit import drop_requests, refit

K0, V0, Q0 = (scale_name(0, role) for role in ("k", "v", "q"))
PROMPTS = [[7, 8, 9, 10, 11], [20, 21, 22]]


def attention(model: torch.nn.Module, layer: int) -> Any:
    return model.model.layers[layer].self_attn.attn


def copies(layer: Any, role: str) -> list[float]:
    """Every place from which some attention backend reads a scale."""
    values = [
        getattr(layer, f"{role}_scale").item(),
        getattr(layer, f"_{role}_scale").item(),
        getattr(layer, f"_{role}_scale_float"),
    ]
    host = getattr(layer, f"_{role}_scale_cpu", None)
    return values if host is None else [*values, host.item()]


def f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


@pytest.fixture
def model(engine: Engine) -> Iterator[torch.nn.Module]:
    """The session's model; its scales are put back afterwards."""
    before = kv_scale_state(engine.model)
    yield engine.model
    set_kv_scales(engine.model, {scale_name(*key): value for key, value in before.items()})
    engine.llm.reset_prefix_cache()


@pytest.mark.parametrize("middle", ["", "attn."])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_loaded_by_name_in_both_forms(
    model: torch.nn.Module, middle: str, shape: tuple[int, ...]
) -> None:
    sent = {"k": 0.11, "v": 0.12, "q": 0.13}
    model.load_weights(
        (f"model.layers.1.self_attn.{middle}{role}_scale", torch.full(shape, value))
        for role, value in sent.items()
    )
    for role, value in sent.items():
        assert set(copies(attention(model, 1), role)) == {f32(value)}
        assert kv_scale_state(model)[1, role] == f32(value)
    assert kv_scale_state(model)[0, "k"] != f32(0.11)


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), float("inf"), 1e-50])
def test_a_bad_value_is_refused_and_changes_nothing(model: torch.nn.Module, bad: float) -> None:
    before = kv_scale_state(model)
    with pytest.raises(ScaleError, match=r"model\.layers\.0\.self_attn\.v_scale"):
        model.load_weights([(V0, torch.tensor([bad], dtype=torch.float64))])
    with pytest.raises(ScaleError, match=r"model\.layers\.0\.self_attn\.v_scale"):
        set_kv_scales(model, {K0: 0.3, V0: bad})  # K0 is not set either
    assert kv_scale_state(model) == before
    assert set(copies(attention(model, 0), "k")) == {before[0, "k"]}
    assert set(copies(attention(model, 0), "v")) == {before[0, "v"]}


def test_post_processing_any_number_of_times_changes_nothing(
    engine: Engine, model: torch.nn.Module
) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    config = engine.llm.llm_engine.vllm_config
    set_kv_scales(model, {K0: 0.2, V0: 0.3, Q0: 0.4})
    before = kv_scale_state(model)
    layer = attention(model, 0)
    pointers = [p.data_ptr() for p in (*layer.parameters(), *layer.buffers())]
    # What a wake-up of vLLM 0.25.1 does, and what a dummy load does to buffers and parameters.
    layer._k_scale.fill_(1.0)
    layer.v_scale.data.fill_(-3e-4)
    layer._prob_scale.fill_(-3e-4)
    for _ in range(2):
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        assert kv_scale_state(model) == before
        for role, value in (("k", 0.2), ("v", 0.3), ("q", 0.4)):
            assert set(copies(layer, role)) == {f32(value)}
        assert layer._prob_scale.item() == 1.0
    assert [p.data_ptr() for p in (*layer.parameters(), *layer.buffers())] == pointers


@pytest.mark.parametrize("with_scales", [False, True])
def test_survive_a_reload(
    engine: Engine,
    model: torch.nn.Module,
    checkpoints: dict[str, Path],
    with_scales: bool,
) -> None:
    set_kv_scales(model, {K0: 0.2, V0: 0.3})
    expected = kv_scale_state(model)
    pointers = {n: t.data_ptr() for n, t in model.state_dict().items() if n.endswith("_scale")}
    stream = list(load_file(checkpoints["a"] / "model.safetensors").items())
    if with_scales:
        layers = {index for index, _ in expected}
        sent = {(i, role): 0.6 + i / 10 for i in layers for role in ("k", "v")}
        stream += [(scale_name(*key), torch.tensor([value])) for key, value in sent.items()]
        expected |= {key: f32(value) for key, value in sent.items()}
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(stream)})
    assert kv_scale_state(model) == expected
    for (layer, role), value in expected.items():
        assert set(copies(attention(model, layer), role)) == {value}
    after = {n: t.data_ptr() for n, t in model.state_dict().items() if n.endswith("_scale")}
    assert after == pointers
    set_kv_scales(model, {K0: 0.8})  # the loaders still reach the live layer
    assert set(copies(attention(model, 0), "k")) == {f32(0.8)}


def test_generation_is_refused_until_scales_are_set(
    other_engine: Callable[..., Engine], checkpoints: dict[str, Path]
) -> None:
    fresh = other_engine(checkpoints["a"], Recipe(), scaled=False, load_format="dummy")
    model = fresh.model
    required = [scale_name(layer, role) for layer in (0, 1) for role in "kv"]
    assert kv_scale_state(model) == {}  # whatever the dummy loader drew
    assert missing_kv_scales(model) == required
    for role in "qkv":
        assert set(copies(attention(model, 0), role)) == {1.0}  # a placeholder, see below

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
    assert len(fresh.greedy(PROMPTS)) == len(PROMPTS)


def test_without_an_fp8_cache_there_is_nothing_to_scale(
    shared_engine: Callable[[str], Engine],
) -> None:
    plain = shared_engine("plain cache")
    model = plain.model
    assert kv_scale_state(model) == {}
    assert missing_kv_scales(model) == []
    with pytest.raises(ScaleError, match="no FP8 KV cache"):
        set_uncalibrated_kv_scales(model, 0.1)
    assert attention(model, 0)._k_scale_float == 1.0
    with pytest.raises(RefitError, match="announced, but the engine has no FP8 KV cache"):
        refit(plain.llm, [], expect_kv_scales=True)
    assert len(plain.greedy(PROMPTS)) == len(PROMPTS)


def test_an_attention_layer_without_a_number_is_refused_by_name(engine: Engine) -> None:
    from vllm.config import set_current_vllm_config

    method = attention(engine.model, 0).quant_method
    backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
    layer = SimpleNamespace(layer_name="pooler.attn", kv_cache_dtype="fp8", attn_backend=backend)
    with (
        set_current_vllm_config(engine.llm.llm_engine.vllm_config),
        pytest.raises(UnsupportedError, match=r"'pooler\.attn' has no number.*'auto'"),
    ):
        method.create_weights(layer)
    assert layer.layer_name not in method.state.kv_scales


def test_scales_that_vllm_would_make_of_the_first_batch_are_refused() -> None:
    check_scale_source(SimpleNamespace())  # vLLM 0.32
    check_scale_source(SimpleNamespace(calculate_kv_scales=False))
    with pytest.raises(UnsupportedError, match=r"calculate_kv_scales.*calibrate_kv_scales"):
        check_scale_source(SimpleNamespace(calculate_kv_scales=True))


def test_layers_that_vllm_would_keep_out_of_an_int8_cache_are_refused() -> None:
    """Without an engine, since a CPU has no such cache."""
    recipe = Recipe.from_dict({"kv_cache": {"dtype": "int8_per_token_head"}})
    cache: Any = SimpleNamespace(
        cache_dtype=recipe.kv_cache.dtype, kv_cache_dtype_skip_layers=["0"]
    )
    with pytest.raises(UnsupportedError, match=r"skip_layers=\['0'\].*pages of two sizes"):
        _check_kv_cache(recipe, cache, torch.bfloat16)
    cache.kv_cache_dtype_skip_layers = []
    _check_kv_cache(recipe, cache, torch.bfloat16)


def test_a_draft_model_beside_an_fp8_cache_is_refused(
    checkpoints: dict[str, Path], other_engine: Callable[..., Engine]
) -> None:
    """Its layers had a cache at scale 1.0, and a draft equal to the target was accepted by 76%."""
    draft = {"model": str(checkpoints["a"]), "method": "draft_model", "num_speculative_tokens": 2}
    with pytest.raises(
        UnsupportedError, match=r"'draft_model', .* without scales .*'fp8_e4m3'; se"
    ):
        other_engine(checkpoints["a"], Recipe(), speculative_config=draft)


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "mtp", "dflash", "of a later release"])
def test_speculation_with_a_cache_of_its_own_beside_a_cache_of_8_bits(method: str) -> None:
    chosen = SimpleNamespace(method=method)
    for dtype in ("fp8_e4m3", "int8_per_token_head"):
        with pytest.raises(UnsupportedError, match=f"'{method}'.*take the method 'ngram', w"):
            check_speculation(dtype, chosen)
    check_speculation("auto", chosen)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The proposer of drafts leaves as many threads as there are cores to the engines after it."""
    yield
    set_threads(1)


@pytest.mark.slow  # numba compiles the proposer for 10 s
@pytest.mark.usefixtures("one_thread")
def test_drafts_from_the_prompt_give_the_tokens_of_an_engine_without(
    checkpoints: dict[str, Path], engine: Engine, other_engine: Callable[..., Engine]
) -> None:
    """It has no layers of its own, and is what the refusal of a draft model names."""
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    speculating = other_engine(
        checkpoints["a"], Recipe(), speculative_config=drafts, disable_log_stats=False
    )
    prompts = [[7, 8, 9] * 4, [20, 21] * 5]
    assert speculating.greedy(prompts, 24) == engine.greedy(prompts, 24)
    drafted = "vllm:spec_decode_num_draft_tokens"
    assert next(each.value for each in speculating.llm.get_metrics() if each.name == drafted) > 0


def test_a_layer_that_the_quantization_never_saw_has_no_cache_of_8_bits(engine: Engine) -> None:
    """The layer is a stand-in: no model that is served builds one."""
    foreign = SimpleNamespace(kv_cache_dtype="fp8_e4m3", quant_method=None)
    layers = dict(engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context)
    require_known_caches(layers)
    with pytest.raises(
        UnsupportedError, match=r"'draft\.0\.attn' \(SimpleNamespace\) has a KV cac"
    ):
        require_known_caches({**layers, "draft.0.attn": foreign})
    foreign.kv_cache_dtype = "auto"
    require_known_caches({**layers, "draft.0.attn": foreign})


def test_scales_stored_in_a_checkpoint_count(
    other_engine: Callable[..., Engine], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    scales = {
        scale_name(layer, role): torch.tensor([0.02 + 0.01 * layer])
        for layer in (0, 1)
        for role in ("k", "v")
    }
    tensors = load_file(checkpoints["a"] / "model.safetensors")
    save_file(tensors | scales, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoints["a"] / "config.json").read_bytes())
    stored = other_engine(tmp_path, Recipe(), scaled=False)
    expected = {(layer, role): f32(0.02 + 0.01 * layer) for layer in (0, 1) for role in "kv"}
    assert kv_scale_state(stored.model) == expected
    assert len(stored.greedy(PROMPTS)) == len(PROMPTS)

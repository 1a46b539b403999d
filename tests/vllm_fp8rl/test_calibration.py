"""KV scales found inside a live engine, against what transformers makes of the same prompts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError
from fp8rl.kv_scales import scale_name, scales_from_amax

pytest.importorskip("vllm")
from vllm import SamplingParams

from support.engine import KV_SCALE, LAYERS, VOCAB, Engine, load_tensors
from support.hf_reference import load_reference
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales, set_uncalibrated_kv_scales
from vllm_fp8rl.kv.observer import ObservedImpl, observed, start_observing, stop_observing
from vllm_fp8rl.kv.scales import forget_kv_scales, fp8_layers, kv_scale_state, set_kv_scales
from vllm_fp8rl.refit import drop_requests, refit

PROMPTS = [[(31 * i + 7 * j * j) % (VOCAB - 5) + 5 for j in range(20 + 9 * i)] for i in range(6)]
NAMES = [scale_name(layer, role) for layer in range(LAYERS) for role in ("k", "v")]


class Observing:
    """Caches of transformers that keep K and V as FP8 does, and note what they are given."""

    def __init__(self, scales: dict[str, float]) -> None:
        self.scales = scales
        self.amax: dict[str, float] = {}

    def next(self) -> DynamicCache:
        outer = self

        class Cache(DynamicCache):
            def update(self, key_states, value_states, layer_idx, *args, **kwargs):
                pair = (("k", key_states), ("v", value_states))
                return super().update(
                    *(outer.kept(scale_name(layer_idx, r), x) for r, x in pair), layer_idx, *args
                )

        return Cache()

    def kept(self, name: str, x: torch.Tensor) -> torch.Tensor:
        self.amax[name] = max(self.amax.get(name, 0.0), x.abs().max().item())
        codes = (x / self.scales[name]).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.float() * self.scales[name]


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Engine]:
    """The session's engine as if it had never had scales."""
    forget_kv_scales(engine.model)
    yield engine
    drop_requests(engine.llm)
    set_uncalibrated_kv_scales(engine.model, KV_SCALE)
    engine.llm.reset_prefix_cache()


def test_equals_what_transformers_observes(fresh: Engine, checkpoints: dict[str, Path]) -> None:
    found = calibrate_kv_scales(fresh.llm, PROMPTS)
    model = load_reference(checkpoints["a"], fresh.recipe).model
    seen = Observing(found)
    for prompt in PROMPTS:
        with torch.no_grad():
            model(torch.tensor([prompt]), past_key_values=seen.next(), use_cache=True)
    assert sorted(found) == sorted(seen.amax) == sorted(NAMES)
    for name, amax in seen.amax.items():
        # A float32 difference may flip an FP8 code before layer 1.
        off = 1e-4 if ".0." in name else 0.01
        exact = fresh.recipe.kv_cache.margin * amax / 448
        assert found[name] in {2.0 ** math.ceil(math.log2(exact * x)) for x in (1 - off, 1 + off)}
    assert fresh.kv_scales() == found
    assert len(fresh.greedy(PROMPTS)) == len(PROMPTS)
    assert not any(isinstance(m.impl, ObservedImpl) for m, _ in fp8_layers(fresh.model))


def test_the_margin_and_more_prompts(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: list[torch.Tensor] = []

    def formula(amax: torch.Tensor, margin: float) -> dict[str, torch.Tensor]:
        tables.append(amax.clone())
        return scales_from_amax(amax, margin)

    monkeypatch.setattr("vllm_fp8rl.calibration.scales_from_amax", formula)
    one = calibrate_kv_scales(fresh.llm, PROMPTS, margin=1.0)
    two = calibrate_kv_scales(fresh.llm, PROMPTS, margin=4.0)
    few = calibrate_kv_scales(fresh.llm, PROMPTS[:1], margin=1.0)
    assert two == {name: 4 * scale for name, scale in one.items()}
    assert all(few[name] <= one[name] for name in NAMES)
    assert tables[-1][:, 1:].sum() < 0.98 * tables[0][:, 1:].sum()


def test_the_margin_of_a_recipe_that_the_caller_has_not(
    fresh: Engine, other_engine: Any, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """It stands in the model's config alone, as for an engine core in a process of its own."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints["a"], folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    recipe = {"kv_cache": {"margin": 2.0}}
    config["quantization_config"] = {"quant_method": "fp8rl", "recipe": recipe}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    doubled = other_engine(folder, Recipe(), additional_config={})
    doubled.llm.llm_engine.vllm_config.additional_config.clear()
    found = calibrate_kv_scales(doubled.llm, PROMPTS)
    one = calibrate_kv_scales(fresh.llm, PROMPTS, margin=1.0)
    assert found == {name: 2 * scale for name, scale in one.items()}


def test_starts_from_scales_before_it_neither_nan_nor_far_off(fresh: Engine) -> None:
    found = calibrate_kv_scales(fresh.llm, PROMPTS)
    set_kv_scales(fresh.model, dict.fromkeys(NAMES, 1e-6))  # clips everything
    as_dicts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    assert calibrate_kv_scales(fresh.llm, as_dicts) == found


def test_prompts_with_a_common_prefix(fresh: Engine) -> None:
    """As a GRPO group has; the prefix cache would skip it."""
    prefix = [(11 * j) % (VOCAB - 5) + 5 for j in range(200)]
    found = calibrate_kv_scales(fresh.llm, [[*prefix, i] for i in range(5, 9)])
    assert calibrate_kv_scales(fresh.llm, [[*prefix, i] for i in range(5, 9)]) == found


def test_one_run_where_the_scales_are_nearly_known(
    fresh: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    generate = fresh.llm.generate

    def counting(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(len(prompts))
        return generate(prompts, *args, **kwargs)

    monkeypatch.setattr(fresh.llm, "generate", counting)
    found = calibrate_kv_scales(fresh.llm, PROMPTS)
    assert len(runs) == 2
    near = {name: scale * 1.2 for name, scale in found.items()}
    assert calibrate_kv_scales(fresh.llm, PROMPTS, start=near) == pytest.approx(found, rel=0.02)
    assert len(runs) == 3
    clipping = {name: scale / 2 for name, scale in found.items()}
    assert calibrate_kv_scales(fresh.llm, PROMPTS, start=clipping) == pytest.approx(found, rel=0.01)
    assert len(runs) == 5


def test_prompts_that_nothing_saw(fresh: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a full CUDA graph had run them."""
    with monkeypatch.context() as patch:
        patch.setattr(ObservedImpl, "do_kv_cache_update", lambda self, *a: None)
        with pytest.raises(ScaleError, match=r"full CUDA graphs.*FULL_AND_PIECEWISE"):
            calibrate_kv_scales(fresh.llm, PROMPTS)
    assert kv_scale_state(fresh.model) == {}


def test_refuses(fresh: Engine, shared_engine: Any, checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ScaleError, match="no prompts"):
        calibrate_kv_scales(fresh.llm, [])
    with pytest.raises(ScaleError, match="margin of KV scales is 0"):
        calibrate_kv_scales(fresh.llm, PROMPTS, margin=0.0)
    waits = SamplingParams(max_tokens=1, detokenize=False)
    fresh.llm.llm_engine.add_request("waits", {"prompt_token_ids": PROMPTS[0]}, waits)
    with pytest.raises(RefitError, match="in flight"):
        calibrate_kv_scales(fresh.llm, PROMPTS)
    drop_requests(fresh.llm)
    plain = shared_engine("plain cache")
    with pytest.raises(ScaleError, match="no FP8 KV cache"):
        calibrate_kv_scales(plain.llm, PROMPTS)
    weights = load_tensors(checkpoints["a"])
    name = "model.layers.1.self_attn.v_proj.weight"
    fresh.model.load_weights([(name, torch.zeros_like(weights[name]))])
    try:
        with pytest.raises(ScaleError, match=scale_name(1, "v")):
            calibrate_kv_scales(fresh.llm, PROMPTS)
    finally:
        fresh.model.load_weights([(name, weights[name])])


def test_sent_scales_are_in_effect_and_empty_the_prefix_cache(fresh: Engine) -> None:
    scales = calibrate_kv_scales(fresh.llm, PROMPTS)
    tokens = fresh.greedy(PROMPTS)
    send_kv_scales(fresh.llm, {name: scale / 64 for name, scale in scales.items()})
    assert fresh.greedy(PROMPTS) != tokens
    with pytest.raises(ScaleError, match=r"layers\.7\."):
        send_kv_scales(fresh.llm, scales | {scale_name(7, "k"): 1.0})
    send_kv_scales(fresh.llm, scales)
    assert fresh.greedy(PROMPTS) == tokens


def test_a_quantized_query_is_bounded_from_above(fresh: Engine) -> None:
    """CPU engines do not quantize queries; this is the observer with a backend that does."""
    layer = next(layer for layer, _ in fp8_layers(fresh.model))
    layer.query_quant = object()
    try:
        for largest, provisional in ((3.3, 1.0), (3.3, 0.01), (700.0, 1.0)):
            start_observing(fresh.model, {scale_name(0, "q"): provisional})
            query = torch.tensor([largest, -0.1]) / provisional
            codes = query.clamp(-448, 448).to(torch.float8_e4m3fn)
            layer.impl.amax["q"] = codes.float().abs().amax()
            layer.impl.quantized_queries = True
            seen = observed(fresh.model)
            assert largest <= seen["amax"][scale_name(0, "q")]
            assert seen["clipped"] == (largest / provisional > 448)
    finally:
        del layer.query_quant
        layer.query_quant = None
        stop_observing(fresh.model)


NAME = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "not as NoneType"),
        ({NAME: None}, f"'{NAME}' is None; send one number"),
        ({NAME: "0.1"}, f"'{NAME}' is '0.1'; send one number"),
        ({NAME: True}, f"'{NAME}' is True; send one number"),
        ({NAME: torch.ones(2)}, "send one value"),
        ({1: 0.1}, "1 is no name of a KV scale"),
        ({"model.layers.0.k_scale": 0.1}, "'model.layers.0.k_scale' is no name of a KV scale"),
    ],
)
def test_what_is_no_scale(engine: Engine, scales, message: str) -> None:
    """Also where a calibration begins: an unknown name there would be left out in silence."""
    tokens = engine.greedy([[5, 6, 7]], 4)
    with pytest.raises(ScaleError, match=message):
        send_kv_scales(engine.llm, scales)
    if scales:
        with pytest.raises(ScaleError, match=message):
            calibrate_kv_scales(engine.llm, [[5, 6, 7]], start=scales)
    assert engine.greedy([[5, 6, 7]], 4) == tokens


def by_hand(engine: Engine) -> None:
    """As ScaleError names it, for which the engine need not be idle."""
    set_uncalibrated_kv_scales(engine.model, KV_SCALE)
    with pytest.raises(RefitError, match=r"A step was refused.*drop_requests"):
        engine.greedy(PROMPTS[:1])
    drop_requests(engine.llm)


REMEDIES = {
    "send_kv_scales": lambda e: send_kv_scales(e.llm, dict.fromkeys(NAMES, KV_SCALE)),
    "calibrate_kv_scales": lambda e: (
        calibrate_kv_scales(e.llm, PROMPTS),
        send_kv_scales(e.llm, dict.fromkeys(NAMES, KV_SCALE)),
    ),
    "refit": lambda e: refit(
        e.llm,
        [
            *load_tensors(Path(e.llm.llm_engine.model_config.model)).items(),
            *((name, torch.tensor([KV_SCALE])) for name in NAMES),
        ],
        expect_kv_scales=True,
    ),
    "set_uncalibrated_kv_scales": by_hand,
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_request_refused_for_want_of_scales_is_in_nobodys_way(fresh: Engine, remedy: str) -> None:
    """And its blocks of the prefix cache, which no step has filled, are not read."""
    prompts = [[(13 * i) % 400 + 7 for i in range(200)]]  # more than a block
    for _ in range(2):
        with pytest.raises(ScaleError, match="was never loaded"):
            fresh.greedy(prompts)
    assert fresh.llm.llm_engine.has_unfinished_requests()
    REMEDIES[remedy](fresh)
    served = fresh.greedy(prompts)
    fresh.llm.reset_prefix_cache()
    assert fresh.greedy(prompts) == served
    assert not fresh.llm.llm_engine.has_unfinished_requests()


def test_two_names_of_one_scale_and_names_that_look_like_one_are_refused(fresh: Engine) -> None:
    send_kv_scales(fresh.llm, dict.fromkeys(NAMES, KV_SCALE))
    both = {NAMES[0]: 0.5, NAMES[0].replace("self_attn.", "self_attn.attn."): 0.25}
    for give in (
        lambda scales: send_kv_scales(fresh.llm, scales),
        lambda scales: set_kv_scales(fresh.model, scales),
        lambda scales: start_observing(fresh.model, scales),
        lambda scales: calibrate_kv_scales(fresh.llm, PROMPTS, start=scales),
    ):
        with pytest.raises(ScaleError, match="are both the k scale of layer 0"):
            give(both)
        for name in ("mtp.layers.0.self_attn.k_scale", "model.layers.00.self_attn.k_scale"):
            with pytest.raises(ScaleError, match=f"'{name}' is no name of a KV scale"):
                give({name: 0.5})
        with pytest.raises(ScaleError, match=r"layers.7.self_attn.k_scale' is no KV scale of"):
            give({scale_name(7, "k"): 0.5})
    assert set(fresh.kv_scales().values()) == {torch.tensor(KV_SCALE).item()}

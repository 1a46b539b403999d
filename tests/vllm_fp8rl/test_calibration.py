"""KV scales found inside a live engine, against what transformers makes of the same prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache
from vllm import SamplingParams

from fp8rl import Recipe
from fp8rl.errors import RefitError, ScaleError
from fp8rl.kv_scales import scale_name
from support.attention import fake_quantized
from support.engine import KV_SCALE, SCALES, VOCAB, Engine, load_tensors
from support.gaps import gap
from support.hf_reference import load_reference
from support.teacher_forced import PROMPTS as SHORT
from support.teacher_forced import vllm_logprobs
from support.tiny import make_family_checkpoint
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales, set_uncalibrated_kv_scales
from vllm_fp8rl.kv.observer import ObservedImpl, start_observing
from vllm_fp8rl.kv.scales import forget_kv_scales, fp8_layers, kv_scale_state, set_kv_scales
from vllm_fp8rl.refit import drop_requests, refit

PROMPTS = [[(31 * i + 7 * j * j) % (VOCAB - 5) + 5 for j in range(20 + 9 * i)] for i in range(6)]
NAMES = list(SCALES)


def observing(scales: dict[str, float], amax: dict[str, float]) -> type[DynamicCache]:
    """Caches of transformers that keep K and V as FP8 does, and note what they are given."""

    def kept(name: str, x: torch.Tensor) -> torch.Tensor:
        amax[name] = max(amax.get(name, 0.0), x.abs().max().item())
        return fake_quantized(x, scales[name]).float()

    class Cache(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            pair = (("k", key_states), ("v", value_states))
            rounded = (kept(scale_name(layer_idx, role), x) for role, x in pair)
            return super().update(*rounded, layer_idx, *args)

    return Cache


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Engine]:
    """The session's engine as if it had never had scales."""
    forget_kv_scales(engine.model)
    yield engine
    drop_requests(engine.llm)
    set_uncalibrated_kv_scales(engine.model, KV_SCALE)
    engine.llm.reset_prefix_cache()


def test_equals_what_transformers_observes(fresh, checkpoints):
    found = calibrate_kv_scales(fresh.llm, PROMPTS)
    model = load_reference(checkpoints["a"], fresh.recipe).model
    seen: dict[str, float] = {}
    kind = observing(found, seen)
    for prompt in PROMPTS:
        with torch.no_grad():
            model(torch.tensor([prompt]), past_key_values=kind(), use_cache=True)
    assert sorted(found) == sorted(seen) == sorted(NAMES)
    for name, amax in seen.items():
        # A float32 difference may flip an FP8 code before layer 1.
        off = 1e-4 if ".0." in name else 0.01
        exact = fresh.recipe.kv_cache.margin * amax / 448
        assert found[name] in {2.0 ** math.ceil(math.log2(exact * x)) for x in (1 - off, 1 + off)}
    assert fresh.kv_scales() == found
    assert not any(isinstance(m.impl, ObservedImpl) for m, _ in fp8_layers(fresh.model))
    # Once more from scales that clip everything, and of dictionaries.
    set_kv_scales(fresh.model, dict.fromkeys(NAMES, 1e-6))
    as_dicts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    assert calibrate_kv_scales(fresh.llm, as_dicts) == found


def test_scale_1_spoils_what_calibrated_scales_keep(other_engine, tmp_path):
    """Of a Qwen2, which has no norms of queries and keys."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}
    path = make_family_checkpoint(tmp_path, 0, "qwen2", **heads)
    tensors = load_tensors(path)
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            tensor *= 0.1  # attention logits stay moderate
            tensor.view(2, 128, -1)[:, 56:64] *= 0.2
        elif name.endswith("k_proj.weight"):
            tensor[56:64] *= 250  # slow frequencies of the rotary embedding, as in Qwen2.5
        elif name.endswith("k_proj.bias"):
            tensor[60:64] = 300
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            tensor *= 2e-4 if "v_proj" in name else 2500
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    # The cache alone, so that nothing else is in the difference.
    started = other_engine(path, recipe := Recipe(rollout=False))
    unquantized = load_reference(path, recipe).many(SHORT)
    found = calibrate_kv_scales(started.llm, SHORT)
    assert max(found.values()) * 448 > 900  # what scale 1.0 clips

    def error(**naive: float) -> float:
        """Mean difference from BF16's logprobs, in nats, with these scales of a role."""
        scales = {name: naive.get(name.rsplit(".")[-1], scale) for name, scale in found.items()}
        send_kv_scales(started.llm, scales)
        return gap(vllm_logprobs(started), unquantized).mean

    calibrated = error()
    assert calibrated < 0.1
    assert error(k_scale=1.0) > 4 * calibrated  # keys are clipped
    assert error(v_scale=1.0) > 10 * calibrated  # values vanish


def test_prompts_with_a_common_prefix(fresh):
    """As a GRPO group has; the prefix cache would skip it."""
    prefix = [(11 * j) % (VOCAB - 5) + 5 for j in range(200)]
    found = calibrate_kv_scales(fresh.llm, [[*prefix, i] for i in range(5, 9)])
    assert calibrate_kv_scales(fresh.llm, [[*prefix, i] for i in range(5, 9)]) == found


def test_prompts_that_nothing_saw(fresh, monkeypatch):
    """As if a full CUDA graph had run them."""
    with monkeypatch.context() as patch:
        patch.setattr(ObservedImpl, "do_kv_cache_update", lambda self, *a: None)
        with pytest.raises(ScaleError, match=r"full CUDA graphs.*FULL_AND_PIECEWISE"):
            calibrate_kv_scales(fresh.llm, PROMPTS)
    assert kv_scale_state(fresh.model) == {}


def test_refuses(fresh, shared_engine, checkpoints):
    with pytest.raises(ScaleError, match="not as NoneType"):
        send_kv_scales(fresh.llm, None)  # type: ignore[arg-type]
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


def test_sent_scales_are_in_effect_and_empty_the_prefix_cache(fresh):
    scales = dict.fromkeys(NAMES, KV_SCALE)
    send_kv_scales(fresh.llm, scales)
    tokens = fresh.greedy(PROMPTS)
    send_kv_scales(fresh.llm, dict.fromkeys(NAMES, KV_SCALE / 64))
    assert fresh.greedy(PROMPTS) != tokens
    send_kv_scales(fresh.llm, scales)
    assert fresh.greedy(PROMPTS) == tokens


def by_hand(engine: Engine) -> None:
    """As ScaleError names it, for which the engine need not be idle."""
    set_uncalibrated_kv_scales(engine.model, KV_SCALE)
    with pytest.raises(RefitError, match=r"A step was refused.*drop_requests"):
        engine.greedy(PROMPTS[:1])
    drop_requests(engine.llm)


REMEDIES = {
    "send_kv_scales": lambda e: send_kv_scales(e.llm, dict.fromkeys(NAMES, KV_SCALE)),
    "calibrate_kv_scales": lambda e: calibrate_kv_scales(e.llm, PROMPTS),
    "refit": lambda e: refit(
        e.llm,
        (load_tensors(Path(e.llm.llm_engine.model_config.model)) | SCALES).items(),
        expect_kv_scales=True,
    ),
    "set_uncalibrated_kv_scales": by_hand,
}


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_request_refused_for_want_of_scales_is_in_nobodys_way(fresh, remedy):
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


NAME = scale_name(0, "k")
OTHER = NAME.replace("self_attn.", "self_attn.attn.")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ([(NAME, 0.0)], NAME),
        ([(NAME, math.nan)], NAME),
        ([(NAME, 1e-50)], NAME),
        ([(NAME, "0.1")], f"'{NAME}' is '0.1'; send one number"),
        ([(NAME, True)], f"'{NAME}' is True; send one number"),
        ([(NAME, torch.ones(2))], "send one value"),
        ([(1, 0.1)], "1 is no name of a KV scale"),
        ([("mtp.layers.0.self_attn.k_scale", 0.1)], "'mtp.layers.0.self_attn.k_scale' is no name"),
        ([(scale_name(7, "k"), 0.1)], r"layers.7.self_attn.k_scale' is no KV scale of"),
        ([(NAME, 0.5), (OTHER, 0.25)], "are both the k scale of layer 0"),
    ],
)
def test_what_is_no_scale(engine, scales, message):
    """Also where a calibration begins: an unknown name there would be left out in silence."""
    before, given = engine.kv_scales(), {NAMES[1]: 0.3} | dict(scales)
    for give in (
        lambda: send_kv_scales(engine.llm, given),
        lambda: set_kv_scales(engine.model, given),
        lambda: start_observing(engine.model, given),
        lambda: calibrate_kv_scales(engine.llm, PROMPTS, start=given),
    ):
        with pytest.raises(ScaleError, match=message):
            give()
    assert engine.kv_scales() == before

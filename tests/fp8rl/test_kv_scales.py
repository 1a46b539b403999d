"""KV-scale names, values and the refusal of anything that is no scale."""

from __future__ import annotations

import logging
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.errors import ScaleError
from fp8rl.kv_scales import (
    check_scale,
    next_scales,
    parse_scale_name,
    power_of_two_scales,
    scale_names,
    scales_from_amax,
)
from fp8rl.recipe import KVCache

K0 = "model.layers.0.self_attn.k_scale"
BAD = [0.0, -1.0, math.nan, math.inf, 1e-16, 1e16]


NO_SCALES = (
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.o_scale",
    "model.layers.01.self_attn.k_scale",
    "model.layers.\N{ARABIC-INDIC DIGIT ONE}.self_attn.k_scale",
    "mtp.layers.0.self_attn.k_scale",
    "model.language_model.layers.0.self_attn.k_scale",
    K0 + ".extra",
)


def test_names_are_those_of_nemo_rl():
    assert scale_names(1) == [
        "model.layers.0.self_attn.attn.q_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ]
    assert parse_scale_name("model.layers.12.self_attn.attn.k_scale") == (12, "k")
    assert not [name for name in NO_SCALES if parse_scale_name(name) is not None]
    wrapper = "model.language_model."
    assert parse_scale_name(f"{wrapper}layers.3.self_attn.attn.q_scale", wrapper) == (3, "q")
    assert parse_scale_name(K0, wrapper) is None


POSITIVE = st.floats(2.0**-20, 2.0**20, width=32)


@given(POSITIVE, st.floats(1.0, 16.0))
def test_a_scale_is_the_smallest_power_of_two_that_holds_the_amax(value, margin):
    scale = scales_from_amax(torch.full((1, 3), value), margin)[K0].item()
    # The factor is rounded to float64, so the bounds may miss by some of its ulps.
    least, ulps = Fraction(value) * Fraction(margin) / 448, Fraction(1, 2**51)
    assert least * (1 - ulps) <= Fraction(scale) < 2 * least * (1 + ulps)
    assert math.frexp(scale)[0] == 0.5


@pytest.mark.parametrize("bad", BAD)
def test_values_that_are_no_scale(bad):
    amax = torch.ones(2, 3, dtype=torch.float64)
    amax[1, 2] = bad * 448
    with pytest.raises(
        ScaleError, match=r"'model\.layers\.1\.self_attn\.v_scale' is .* [Cc]alibrate"
    ):
        scales_from_amax(amax, margin=1.0)
    for wrap in (float, torch.tensor):
        with pytest.raises(ScaleError, match=f"'{K0}' is "):
            check_scale(K0, wrap(bad))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: scales_from_amax(torch.ones(3), margin=1.0), r"\[num_layers, 3\]"),
        (lambda: scales_from_amax(torch.ones(2, 2), margin=1.0), r"\[num_layers, 3\]"),
        (
            lambda: check_scale(K0, torch.ones(1, dtype=torch.uint8)),
            f"'{K0}' came in torch.uint8; send it in float32",
        ),
        (lambda: check_scale(K0, torch.ones(0)), "one value per tensor"),
        (lambda: check_scale(K0, torch.ones(2)), "one value per tensor"),
        (lambda: power_of_two_scales({"a": math.nan}), "'a' is nan"),
        (lambda: next_scales({K0: math.nan}, torch.ones(1, 3), KVCache()), f"'{K0}' is nan"),
    ],
)
def test_refused(call, match):
    with pytest.raises(ScaleError, match=match):
        call()


def one_layer(*amax: float) -> torch.Tensor:
    return torch.tensor([amax])


MARGINS = st.sampled_from([1.0, 1.05, 1.5, 2.0, 4.0])


def power_at_least(least: Fraction) -> Fraction:
    """The smallest power of two that is not below a number, by search in exact numbers."""
    power = Fraction(2) ** -60
    while power < least:
        power *= 2
    return power


@given(first=POSITIVE, later=st.lists(POSITIVE, min_size=1, max_size=6), margin=MARGINS)
def test_grow_keeps_a_scale_until_its_amax_leaves_it(first, later, margin):
    settings = KVCache(recalibrate="grow", margin=margin)
    scales, outgrown = next_scales({}, one_layer(first, first, first), settings)
    exact = float(power_at_least(Fraction(first) * Fraction(margin) / 448))
    assert outgrown == () and [s.item() for s in scales.values()] == [exact] * 3
    assert {(scale.shape, scale.dtype) for scale in scales.values()} == {((1,), torch.float32)}
    for amax in later:
        before = {name: scale.item() for name, scale in scales.items()}
        scales, outgrown = next_scales(scales, one_layer(first, amax, first), settings)
        left = Fraction(amax) > 448 * Fraction(before[K0])
        assert outgrown == ((K0,) if left else ())
        expected = Fraction(before[K0])
        if left:
            expected *= power_at_least(Fraction(amax) * Fraction(margin) / 448 / expected)
        assert scales[K0].item() == float(expected)
        assert all(scales[name].item() == before[name] for name in before if name != K0)
        assert amax <= 448 * scales[K0].item()


def test_scales_of_others_are_rounded_up_to_powers_of_two():
    given = {"a": 0.25, "b": 0.2500001, "c": 3.0, "d": 1}
    assert power_of_two_scales(given) == {"a": 0.25, "b": 0.5, "c": 4.0, "d": 1.0}


def test_start_keeps_its_scales_and_says_what_they_clip(caplog):
    settings = KVCache(recalibrate="start")
    first = next_scales({}, one_layer(1.0, 1.0, 1.0), settings).scales
    edge = 448 * first[K0].item()
    assert edge >= 4.0  # the margin
    with caplog.at_level(logging.WARNING):
        assert next_scales(first, one_layer(1.0, edge, 1.0), settings) == (first, ())
        assert not caplog.messages
        found = next_scales(first, one_layer(1.0, 1.5 * edge, 1.0), settings)
    assert found == (first, (K0,))
    assert f"1 KV scales clip; for '{K0}'" in caplog.text


def test_refit_follows_every_batch():
    amax, held = one_layer(1.0, 2.0, 3.0), dict.fromkeys(scale_names(1), 1.0)
    assert next_scales(held, amax, KVCache()).scales == scales_from_amax(amax, 1.05)

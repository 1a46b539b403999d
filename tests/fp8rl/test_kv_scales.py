"""KV-scale names, values and the refusal of anything that is no scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.errors import ScaleError
from fp8rl.kv_scales import (
    ROLES,
    check_scale,
    parse_scale_name,
    scale_name,
    scale_names,
    scales_from_amax,
)

K0 = "model.layers.0.self_attn.k_scale"
BAD = [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 1e-38, 1e-16, 1e16, 3e38]


@given(layer=st.integers(0, 10_000), role=st.sampled_from(ROLES))
def test_names_parse_back(layer, role):
    assert parse_scale_name(scale_name(layer, role)) == (layer, role)


def test_names_are_those_of_nemo_rl():
    assert scale_names(1) == [
        "model.layers.0.self_attn.attn.q_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.v_scale",
    ]
    assert parse_scale_name("model.layers.12.self_attn.attn.k_scale") == (12, "k")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.x.self_attn.k_scale",
        "layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.o_scale",
        K0 + "\n",
        K0 + ".extra",
    ],
)
def test_other_names_are_no_scales(name):
    assert parse_scale_name(name) is None


def test_scale_is_amax_times_margin_over_448():
    amax = torch.tensor([[1.0, 2.0, 4.0], [448.0, 0.5, 100.0]])
    scales = scales_from_amax(amax, margin=1.25)
    assert list(scales) == scale_names(2)
    for (name, scale), value in zip(scales.items(), amax.flatten().tolist(), strict=True):
        assert scale.shape == (1,)
        assert scale.dtype == torch.float32
        assert scale.item() == pytest.approx(value * 1.25 / 448, rel=1e-6), name


POSITIVE = st.floats(2.0**-20, 2.0**20, width=32)


@given(POSITIVE, st.floats(1.0, 16.0))
def test_the_dtype_of_amax_says_how_the_product_is_rounded(value, margin):
    """Observers of trainers keep float32 tensors, an engine's calibration has Python numbers."""
    for dtype, expected in (
        (torch.float32, torch.tensor(value) * (margin / 448.0)),
        (torch.float64, torch.tensor(value * (margin / 448.0), dtype=torch.float32)),
    ):
        scales = scales_from_amax(torch.full((1, 3), value, dtype=dtype), margin)
        assert all(scale.item() == expected.item() for scale in scales.values())


@pytest.mark.parametrize("bad", BAD)
def test_amax_without_a_scale(bad):
    amax = torch.ones(2, 3, dtype=torch.float64)
    amax[1, 2] = bad * 448
    with pytest.raises(
        ScaleError, match=r"'model\.layers\.1\.self_attn\.v_scale' is .* [Cc]alibrate"
    ):
        scales_from_amax(amax, margin=1.0)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (1, 2, 3)])
def test_amax_of_wrong_shape(shape):
    with pytest.raises(ScaleError, match=r"\[num_layers, 3\]"):
        scales_from_amax(torch.ones(shape), margin=1.0)


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25), torch.tensor([[0.25]]).bfloat16()])
def test_check_scale_returns_the_float(scale):
    assert check_scale(K0, scale) == 0.25


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("wrap", [float, torch.tensor])
def test_check_scale_refuses(bad, wrap):
    with pytest.raises(ScaleError, match=f"'{K0}' is "):
        check_scale(K0, wrap(bad))


@pytest.mark.parametrize("bound", [2.0**-50, 2.0**50])
def test_with_a_scale_that_passes_attention_computes_numbers(bound):
    """Down to E4M3's smallest code and up to its largest, over a wide head, in both dtypes."""
    for dtype in (torch.float32, torch.bfloat16):
        scale = torch.tensor(check_scale(K0, bound), dtype=dtype)
        for code, normal in ((448.0, True), (2.0**-9, True), (0.0, False)):
            values = torch.full((1024,), code).to(torch.float8_e4m3fn).to(dtype) * scale
            product = values @ values
            assert product.isfinite() and (product >= torch.finfo(dtype).tiny) == normal
        assert (1 / scale).isfinite()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_check_scale_casts_nothing(dtype):
    with pytest.raises(ScaleError, match=f"'{K0}' came in {dtype}; send it in float32"):
        check_scale(K0, torch.ones(1, dtype=dtype))


@pytest.mark.parametrize("shape", [(0,), (2,)])
def test_check_scale_wants_one_element(shape):
    with pytest.raises(ScaleError, match="one value per tensor"):
        check_scale(K0, torch.ones(shape))

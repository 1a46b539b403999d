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
    check_complete,
    check_scale,
    merge_amax,
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


def complete(num_layers: int) -> dict[str, float]:
    return dict.fromkeys(scale_names(num_layers, ("k", "v")), 0.5)


def test_complete_set_passes_with_and_without_q():
    check_complete(complete(3), 3)
    check_complete(complete(2) | {scale_name(0, "q"): 1.0}, 2)
    other_spelling = {name.replace("attn.k", "attn.attn.k"): 0.5 for name in complete(2)}
    check_complete(other_spelling, 2)


@given(data=st.data(), num_layers=st.integers(1, 5))
def test_any_missing_scale_is_named(data, num_layers):
    scales = complete(num_layers)
    gone = data.draw(st.sampled_from(sorted(scales)))
    del scales[gone]
    with pytest.raises(ScaleError, match=f"1 KV scales are missing, the first is '{gone}'"):
        check_complete(scales, num_layers)


def test_q_is_required_where_asked_for():
    with pytest.raises(ScaleError, match="q_scale"):
        check_complete(complete(1), 1, ROLES)


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.k_scale", "lm_head.weight"])
def test_unknown_scale(name):
    with pytest.raises(ScaleError, match=f"'{name}' is no KV scale of a model with 2 layers"):
        check_complete(complete(2) | {name: 1.0}, 2)


def test_doubled_scale():
    with pytest.raises(ScaleError, match="came twice"):
        check_complete(complete(1) | {"model.layers.0.self_attn.attn.k_scale": 0.5}, 1)


@pytest.mark.parametrize("bad", BAD)
def test_bad_value_in_a_complete_set(bad):
    with pytest.raises(ScaleError, match=f"'{K0}' is "):
        check_complete(complete(1) | {K0: bad}, 1)


def test_merge_is_the_elementwise_maximum():
    a, b = torch.tensor([[1.0, 5.0, 0.0]]), torch.tensor([[2.0, 4.0, math.nan]])
    merged = merge_amax([a, b])
    assert merged[0, :2].tolist() == [2.0, 5.0]
    assert math.isnan(merged[0, 2])
    assert a[0, 0] == 1.0, "the first table was overwritten"


def test_merge_refuses_nothing_and_other_shapes():
    with pytest.raises(ScaleError, match="none was given"):
        merge_amax([])
    with pytest.raises(ScaleError, match=r"\(1, 3\) and \(2, 3\)"):
        merge_amax([torch.ones(1, 3), torch.ones(2, 3)])

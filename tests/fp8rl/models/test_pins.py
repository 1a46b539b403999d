"""Pins: what stays in BF16, and every pin that cannot be meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.errors import PinError
from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins

LAYERS = 6
LINEARS = [
    *(f"self_attn.{leaf}_proj" for leaf in "qkvo"),
    *(f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")),
]
MOE = [
    "model.embed_tokens",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.mlp.up_proj",
    "model.layers.1.mlp.gate",
    *(f"model.layers.1.mlp.experts.{e}.{p}_proj" for e in range(2) for p in ("gate", "up", "down")),
    "lm_head",
]


def resolve(**pins) -> PinPolicy:
    return PinPolicy(Pins(**pins), ModelSpec.dense(LAYERS).names)


def test_names_and_kinds():
    policy = resolve(names=["*.down_proj"], kinds=["qkv_proj"])
    expected = {
        f"model.layers.{i}.{n}"
        for i in range(LAYERS)
        for n in LINEARS
        if n in ("mlp.down_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    }
    assert set(policy.bf16_linears()) == expected
    assert policy.row("model.layers.0.mlp.down_proj").reason == "names: *.down_proj"
    assert policy.row("model.layers.0.self_attn.k_proj").reason == "kinds: qkv_proj"
    pinned = resolve(names=["model.layers.[34].*"]).bf16_linears()
    assert pinned == [f"model.layers.{i}.{n}" for i in (3, 4) for n in LINEARS]


@given(data=st.data(), num_layers=st.integers(1, 12))
def test_equal_to_a_set_of_layer_numbers(data, num_layers):
    numbers = data.draw(st.lists(st.integers(-num_layers, num_layers - 1), max_size=4))
    first, last = data.draw(st.tuples(*[st.integers(0, num_layers)] * 2))
    policy = PinPolicy(
        Pins(layers=tuple(numbers), first=first, last=last), ModelSpec.dense(num_layers).names
    )
    every = list(range(num_layers))
    pinned = {every[n] for n in numbers} | set(every[:first]) | set(every[num_layers - last :])
    for row in policy.report():
        if row.layer is not None and row.kind != "norm":
            assert (row.precision == "bf16") == (row.layer in pinned), row


def test_mixture_of_experts():
    policy = PinPolicy(Pins(names=("*.experts.*",)), MOE)
    summary = PinPolicy(Pins(names=("*.experts.*.down_proj",)), MOE).summary()
    assert summary.endswith("pinned to BF16: model.layers.1.mlp.experts.{0-1}.down_proj")
    assert policy.precision("model.layers.0.mlp.gate_up_proj") == "fp8"
    assert policy.row("model.layers.1.mlp.gate").reason == "always: router"
    assert policy.precision("model.layers.1.mlp.experts.1.down_proj") == "bf16"
    assert PinPolicy(Pins(kinds=("experts",)), MOE).bf16_linears() == policy.bf16_linears()


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"layers": [6]}, r"pins\.layers: 6 matches nothing, the model has layers 0 to 5"),
        ({"layers": [-7]}, r"pins\.layers: -7 matches nothing.*or -6 to -1"),
        (
            {"names": ["*.0.mlp.up_proj"]},
            "up_proj' but .*not all parts of the fused '.*0.mlp.gate_up_proj'.*or use kin",
        ),
        ({"first": 7}, r"pins\.first: 7 is more than the model's 6 layers"),
        ({"last": 7}, r"pins\.last: 7 is more than the model's 6 layers"),
        ({"names": ["model.layers.9.*"]}, r"pins\.names: model\.layers\.9\.\* matches no module"),
        ({"names": ["*.down_porj"]}, "names look like 'model.layers.0.input_layernorm'"),
        ({"kinds": ["experts"]}, r"pins\.kinds: experts matches no module"),
    ],
)
def test_refused(pins, message):
    with pytest.raises(PinError, match=message):
        resolve(**pins)


def test_a_module_of_another_model():
    with pytest.raises(PinError, match=r"is not in the model that the pins were resolved for \(6"):
        resolve().precision("model.layers.6.mlp.down_proj")

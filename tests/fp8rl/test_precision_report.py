"""The rendering of resolved pins."""

from __future__ import annotations

from fp8rl.models.pins import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.precision_report import precision_section, precision_text
from fp8rl.recipe import Pins

LINEARS = "qkv_proj, o_proj, gate_up_proj, down_proj"


def test_layers_that_are_treated_alike_share_a_line():
    rows = PinPolicy(Pins(layers=(1,)), ModelSpec.dense(4).names).report()
    pinned = ", ".join(f"{kind} (layers: 1)" for kind in LINEARS.split(", "))
    outside = "embed_tokens (always: embed_tokens), lm_head (always: lm_head)"
    assert precision_text(rows).splitlines() == [
        f"  outside the layers: BF16 {outside}",
        f"  layers 0, 2-3: FP8 {LINEARS}",
        f"  layers 1: BF16 {pinned}",
    ]
    assert precision_section(rows).rows == (
        ("outside", "", outside),
        ("0, 2-3", LINEARS, ""),
        ("1", "", pinned),
    )


def test_a_part_of_the_experts_is_counted():
    spec = ModelSpec.of({"model_type": "qwen3_moe", "num_experts": 3, "num_hidden_layers": 1})
    text = precision_text(PinPolicy(Pins(names=("*.experts.1.*",)), spec.names).report())
    assert "FP8 qkv_proj, o_proj, experts [6 of 9]; BF16 router (always: router)" in text
    assert "experts [3 of 9] (names: *.experts.1.*)" in text

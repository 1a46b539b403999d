"""The rendering of resolved pins."""

from __future__ import annotations

from fp8rl.families import dense_module_names, module_names
from fp8rl.pinning import PinPolicy
from fp8rl.precision_report import precision_section, precision_text
from fp8rl.recipe import Pins

LINEARS = "qkv_proj, o_proj, gate_up_proj, down_proj"


def test_layers_that_are_treated_alike_share_a_line():
    rows = PinPolicy(Pins(layers=(1,)), dense_module_names(4)).report()
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
    pins = Pins(names=("*.experts.1.*",))
    text = precision_text(
        PinPolicy(
            pins,
            module_names({"model_type": "qwen3_moe", "num_experts": 3, "num_hidden_layers": 1}),
        ).report()
    )
    assert "FP8 qkv_proj, o_proj, experts [6 of 9]; BF16 router (always: router)" in text
    assert "experts [3 of 9] (names: *.experts.1.*)" in text

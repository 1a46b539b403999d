"""Many names in one short line."""

from __future__ import annotations

from fp8rl.listing import listed, number_ranges

LEAVES = ("self_attn.q_proj", "mlp.down_proj")


def names(layers: list[int], leaf: str) -> list[str]:
    return [f"model.layers.{layer}.{leaf}" for layer in layers]


def test_names_that_differ_in_their_numbers_are_one_pattern():
    assert (number_ranges([]), number_ranges([7, 0, 2, 1, 7, 9, 8])) == ("", "0-2, 7-9")
    assert listed([]) == ""
    assert listed(["lm_head"]) == "lm_head"
    assert listed(names([3], LEAVES[0])) == "model.layers.3.self_attn.q_proj"
    mixed = [*names([0, 1, 2, 9], LEAVES[0]), "lm_head", *names([5], LEAVES[1])]
    assert listed(mixed) == (
        "model.layers.{0-2, 9}.self_attn.q_proj, lm_head, model.layers.5.mlp.down_proj"
    )
    every = [f"l.{layer}.experts.{expert}.up" for layer in range(3) for expert in range(4)]
    assert listed(every) == "l.{0-2}.experts.{0-3}.up"
    every.remove("l.1.experts.2.up")
    assert listed(every) == "l.{0, 2}.experts.{0-3}.up, l.1.experts.{0-1, 3}.up"
    # What is said of each keeps it apart from the others.
    rows = [f"{name} (k {64 if '.0.' in name else 32})" for name in names([0, 1, 2], LEAVES[0])]
    assert listed(rows) == (
        "model.layers.0.self_attn.q_proj (k 64), model.layers.{1-2}.self_attn.q_proj (k 32)"
    )


def test_what_does_not_fit_is_counted():
    text = listed([f"module_{'x' * number}" for number in range(50)], most=100)
    shown = text.split(" and ")[0].split(", ")
    assert len(text) < 120 and text.endswith(f" and {50 - len(shown)} more")
    assert listed(["y" * 500, "z"]) == f"{'y' * 500} and 1 more"

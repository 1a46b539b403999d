"""Many names in one short line."""

from __future__ import annotations

import re
from itertools import product

from fp8rl.listing import listed, number_ranges

LEAVES = ("self_attn.q_proj", "mlp.down_proj")


def names(layers: list[int], leaf: str) -> list[str]:
    return [f"model.layers.{layer}.{leaf}" for layer in layers]


def test_number_ranges():
    assert number_ranges([]) == ""
    assert number_ranges([7, 0, 2, 1, 7, 9, 8]) == "0-2, 7-9"


def test_names_that_differ_in_their_numbers_are_one_pattern():
    assert listed([]) == ""
    assert listed(["lm_head"]) == "lm_head"
    assert listed(names([3], LEAVES[0])) == "model.layers.3.self_attn.q_proj"
    mixed = [*names([0, 1, 2, 9], LEAVES[0]), "lm_head", *names([5], LEAVES[1])]
    assert listed(mixed) == (
        "model.layers.{0-2, 9}.self_attn.q_proj, lm_head, model.layers.5.mlp.down_proj"
    )
    # What is said of each keeps it apart from the others.
    rows = [f"{name} (k {64 if '.0.' in name else 32})" for name in names([0, 1, 2], LEAVES[0])]
    assert listed(rows) == (
        "model.layers.0.self_attn.q_proj (k 64), model.layers.{1-2}.self_attn.q_proj (k 32)"
    )


def test_a_pattern_stands_for_all_its_names_and_no_others():
    every = [f"l.{layer}.experts.{expert}.up" for layer, expert in product(range(3), range(4))]
    assert listed(every) == "l.{0-2}.experts.{0-3}.up"
    some = [name for name in every if name not in ("l.1.experts.2.up", "l.2.experts.0.up")]
    text = listed(some)
    spelled = set()
    for pattern in re.split(r", (?=l)", text):
        layers, experts = re.findall(r"\{([^}]*)\}|(?<=\.)(\d+)(?=\.)", pattern)
        ranges = [
            [
                number
                for part in (braced or plain).split(", ")
                for first, last in [(part.split("-") * 2)[:2]]
                for number in range(int(first), int(last) + 1)
            ]
            for braced, plain in (layers, experts)
        ]
        spelled |= {f"l.{layer}.experts.{expert}.up" for layer, expert in product(*ranges)}
    assert spelled == set(some)


def test_what_does_not_fit_is_counted():
    many = [f"module_{'x' * number}" for number in range(50)]
    text = listed(many, most=100)
    assert len(text) < 120
    shown = text.split(" and ")[0].split(", ")
    assert text.endswith(f" and {50 - len(shown)} more")
    assert listed(["y" * 500, "z"]) == f"{'y' * 500} and 1 more"

"""What to put into the recipe, by a plain rule over what was measured (docs/bench.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from fp8rl_bench.variants import cache_of

SPREAD = 0.03
"""Speeds that differ by less count as equal, or by what repeated calls differ if that is more."""
NEAR = 1.25
"""A cache is among the best if its KL is at most so many times the smallest: SmolLM2's FP8 cache,
1.4 times INT8's, cost 13 points of long answers, INT8 none (``expect.md``, ``accuracy.md``)."""
GATE = 1.3
"""Largest ``capped_prob_error`` that needs no remedy, as the guard's ``tighten_above`` in the first
steps of a run: plain errors of a healthy small pretrained model are 1.14 to 1.25
(``docs/measurements/expect.md``)."""
CACHES = {"fp8rl-kv": "FP8", "fp8rl-int8": "INT8", "fp8rl": "BF16"}
OFF = {"rollout": False, "training": False, "kv_cache": {"dtype": "auto"}}
"""Recipe of BF16 on both sides."""


@dataclass(frozen=True)
class Advice:
    """The advice, and the recipe that follows from it."""

    text: str
    recipe: dict[str, Any]


def advise(report: Mapping[str, Any]) -> Advice:
    """Choose cache and precision.

    1. Of fp8rl's caches those remain whose KL to the trainer is near the smallest; with random
       weights all. The fastest is chosen, on a CPU that with the smallest KL.
    2. FP8 pays in rollouts if that is faster than BF16 by more than the spread. If not, both sides
       stay in BF16. It pays in training if a layer is not slower, forward and backward.
    3. With a ``capped_prob_error`` above ``GATE`` the advice is ``exact``, if that was measured and
       is faster than BF16; if it cannot run or is slower, BF16. Where it was left out, the advice
       is to measure it; where it was not scored, its row says why.
    """
    rows = report["variants"]
    on_gpu = report["device"] != "CPU"
    trains, trained = _training(report)
    trainer = report["training"].get("trainer" if trains else "bf16_trainer", {})
    speeds = {name: row["tokens_per_second"] for name, row in rows.items() if _speed(row)}
    names = [name for name in CACHES if name in speeds or not on_gpu]
    kl = {name: trainer[name]["kl_k3"] for name in names if name in trainer}
    near = [name for name in kl if kl[name] <= NEAR * min(kl.values())]
    near = names if report["random"] else near
    if not near or (on_gpu and "bf16" not in speeds):
        return Advice("No advice: too little was measured; the rows say why.", {})
    if not on_gpu:
        chosen = min(near, key=lambda name: kl.get(name, 0.0))
        text = "CPU: FP8 is emulated, so nothing follows for speed."
        return _judged(report, Advice(text, _recipe(chosen, True)), chosen, trainer, None)
    chosen = max(near, key=lambda name: median(speeds[name]))
    gain = median(speeds[chosen]) / median(speeds["bf16"])
    spread = max(SPREAD, *(_spread(speeds[name]) for name in (chosen, "bf16")))
    told = f"rollouts run at {gain:.2f} times BF16's tokens/s{trained}"
    if gain <= 1 + spread:
        return Advice(f"FP8 does not pay at this size and load: {told}. Stay in BF16.", OFF)
    text = f"FP8 pays at this size and load: {told}. Cache: {CACHES[chosen]}."
    return _judged(report, Advice(text, _recipe(chosen, trains)), chosen, trainer, spread)


def _judged(
    report: Mapping[str, Any],
    advice: Advice,
    chosen: str,
    trainer: Mapping[str, Any],
    spread: float | None,
) -> Advice:
    """Complete the advice by what the log-probabilities say."""
    if chosen not in trainer:
        return Advice(f"{advice.text} Random weights say nothing about KL.", advice.recipe)
    error, kl = trainer[chosen]["capped_prob_error"], trainer[chosen]["kl_k3"]
    text = f"{advice.text} KL to the trainer {kl:.1e}, capped_prob_error {error:.3f}"
    if error <= GATE:
        return Advice(f"{text}, within {GATE}.", advice.recipe)
    text += f", above {GATE}"
    exact = report["variants"].get("fp8rl-exact", {})
    if not exact or "left out" in exact["failed"]:
        return Advice(f"{text}: measure exact too (--variants bf16,fp8rl-exact).", advice.recipe)
    if not _speed(exact):
        return Advice(f"{text}, and exact cannot be taken here: stay in BF16.", OFF)
    gain = ""
    if spread is not None:
        over = median(exact["tokens_per_second"])
        over /= median(report["variants"]["bf16"]["tokens_per_second"])
        if over <= 1 + spread:
            return Advice(f"{text}, and exact is not faster than BF16: stay in BF16.", OFF)
        gain = f" at {over:.2f} times BF16's"
    told = report["training"].get("trainer", {}).get("fp8rl-exact")
    if told is None:
        return Advice(f"{text}, and exact was not scored; the rows say why.", advice.recipe)
    return Advice(f"{text}: take exact{gain}, whose KL is {told['kl_k3']:.1e}.", {"exact": True})


def _training(report: Mapping[str, Any]) -> tuple[bool, str]:
    """Tell whether FP8 is not slower in a layer of the trainer, and by how much."""
    layer = report["training"].get("layer", {})
    fp8 = layer.get("fp8rl, FP8 K and V", layer.get("fp8rl"))  # the first is the default recipe
    if "BF16" not in layer or fp8 is None or report["device"] == "CPU":
        return True, ""
    gain = layer["BF16"] / fp8
    return gain >= 1 - SPREAD, f", a training layer at {gain:.2f} times BF16's speed"


def _recipe(chosen: str, trains: bool) -> dict[str, Any]:
    recipe: dict[str, Any] = {"kv_cache": {"dtype": cache_of(chosen)}}
    return recipe if trains else {"training": False, **recipe}


def recipe_line(recipe: Mapping[str, Any]) -> str:
    """Return a recipe as a line of YAML; nothing if there is none."""
    return f"fp8rl: {json.dumps(recipe)}" if recipe else ""


def _speed(row: Mapping[str, Any]) -> bool:
    return bool(row.get("tokens_per_second"))


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / median(values)

#!/usr/bin/env python
"""Write the table of docs/estimate.md: what ``fp8rl estimate`` computes beside what was measured.

    python tools/estimate_page.py

tests/fp8rl/test_estimate.py compares the page with the same files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fp8rl import PluginManager, Recipe
from fp8rl.estimate import Load, Model, find_gpu, optimizer_seconds, rollout, trainer_seconds
from fp8rl.families import module_names
from fp8rl.measured import Engine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "estimate.md"
BEGIN = "<!-- written by tools/estimate_page.py: begin -->"
END = "<!-- written by tools/estimate_page.py: end -->"
BOUND = 0.15
"""Largest relative error that counts as met."""

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN3_1_7B = {
    **QWEN3_8B,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


class Row(NamedTuple):
    """A figure that was measured, and what is computed for it."""

    what: str
    gpu: str
    precision: str
    unit: str
    predicted: float
    measured: float
    files: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def result(name: str) -> Any:
    """Return the values of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def model(config: dict[str, Any]) -> Model:
    """Return the shapes of a model whose linear layers are all in FP8."""
    policy = PluginManager(discover=False).pin_policy(Recipe().pins, module_names(config))
    return Model(config, policy.report())


def rows() -> Iterator[Row]:
    """Yield every measured figure that the estimate has something for."""
    yield from _rollouts()
    yield from _eight_layers()
    yield from _steps()


def _rollouts() -> Iterator[Row]:
    names = ("rollout_h100", *(f"rollout_{n}_h100" for n in (2, 3, 4, 5)), "versions_gpu")
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for file in names:
        for each in result(file)["results"]:
            gpu = "h200" if "H200" in each["gpu"] else "h100"
            for load, speeds in each["loads"].items():
                key = (gpu, load, each["variant"].removesuffix("-kv"))
                found.setdefault(key, []).append((speeds["median"], file))
    noted = result("noted")["qwen3_30b_a3b"]
    big = {(engine, "noted"): noted[engine] for engine in ("bf16", "fp8rl")}
    for (gpu, load, engine), figures in sorted(found.items()):
        measured = median(figure for figure, _ in figures)
        files = tuple(dict.fromkeys(file for _, file in figures))
        yield _rollout("Qwen3-8B", QWEN3_8B, gpu, load, engine, measured, files)
    for (engine, file), measured in big.items():
        yield _rollout(
            "Qwen3-30B-A3B", QWEN3_30B_A3B, "h200", "256x512x1024", engine, measured, (file,)
        )

"""docs/scale.md is what benchmarks/scale.py computes, and that agrees with what was measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


scale = load()


def test_the_pages_table_is_the_scripts() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for cells in scale.table():
        assert f"| {' | '.join(cells)} |" in lines


def measured(name: str) -> list[tuple[int, float, float]]:
    """Bytes without KV scales, and milliseconds of the GPU and of the whole, of each refit."""
    if name == "qwen3_8b":
        results = ROOT / "benchmarks" / "results"
        sent = json.loads((results / "refit_gpu_h100.json").read_text())[0]["received_bytes"]
        found = json.loads((results / "refit_compiled_h200.json").read_text())["milliseconds"]
        return [
            (sent, sum(found["kernels"][k] for k in ("finite", "quantize")), found["on"]["median"])
        ]
    numbers = (2, 3) if name == "30b" else (3,)
    rows = [row for number in numbers for row in scale.results(f"rollout_{name}_{number}_h200")]
    scales = 4 * 3 * 48 if name == "30b" else 0  # q, k and v of each layer, in float32
    return [
        (
            row["refit_bytes"] - scales,
            sum(row["refit_gpu_ms"][kind] for kind in ("finite", "multi_tensor")),
            1e3 * row["refit_seconds_median"],
        )
        for row in rows
    ]


@pytest.mark.parametrize(
    ("shape", "name"),
    [("qwen3_8b", "qwen3_8b"), ("moonlight_16b_a3b", "moonlight"), ("qwen3_30b_a3b", "30b")],
)
def test_sizes_are_those_measured_and_times_near_them(shape: str, name: str) -> None:
    model = scale.Model(scale.shape(shape))
    seconds = model.seconds(scale.Cost.measured())
    found = measured(name)
    assert found
    for sent, gpu, whole in found:
        assert model.bf16 == sent
        assert 1e3 * seconds[0] == pytest.approx(gpu, rel=0.1)
        assert 1e3 * sum(seconds) == pytest.approx(whole, rel=1 / 3)

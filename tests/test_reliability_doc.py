"""The pages of reliability and fuzz: tests that are named are there, figures are the run's."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "measurements"
DOC = (PAGES / "reliability.md").read_text(encoding="utf-8")
FUZZ = (PAGES / "fuzz.md").read_text(encoding="utf-8")
RESULT = ROOT / "benchmarks" / "results" / "reliability_cpu.json"
PAINS = 21


def rows() -> dict[int, str]:
    return {int(n): row for n, row in re.findall(r"^\| (\d+) \| (.*) \|$", DOC, re.MULTILINE)}


def test_every_pain_has_a_test_or_a_measurement() -> None:
    assert list(rows()) == list(range(1, PAINS + 1))
    for number, row in rows().items():
        assert "::test_" in row or "benchmarks/results/" in row, f"pain {number} is not proven"


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", DOC)
    assert len(named) > PAINS
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{path}::{name}"


def test_figures_are_those_of_the_recorded_run() -> None:
    run = json.loads(RESULT.read_text())
    assert f"`{run['command']}`: {run['seconds'] / 60:.0f} minutes, no failure" in FUZZ
    assert min(run["counts"][what] for what in ("exports of sources that change", "senders killed"))

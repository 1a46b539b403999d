"""Tiles of experts: the shipped files are chosen from the measured times, few and quick."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest

from support.benchmarks import BENCHMARKS, imported
from vllm_fp8rl.kernels.moe_settings import TILES

RESULTS = json.loads((BENCHMARKS / "results" / "expert_tiles_h200.json").read_text())
KEYS = tuple(RESULTS["qwen3_30b_a3b"][0]["default"])
WIDE, NARROW, OTHER = (64, 128, 128, 1, 4, 3), (16, 64, 128, 1, 4, 3), (32, 64, 128, 1, 4, 3)


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("few_tiles", monkeypatch)


def row(tokens: int, default: tuple[int, ...], slow: float, **taken: Any) -> dict[str, Any]:
    """Times of one number of tokens, as tune_experts.py writes them."""
    return {
        "tokens": tokens,
        "default": dict(zip(KEYS, default, strict=True)),
        "default_ms": slow,
        "quickest": [[ms, *tiles] for tiles, ms in taken["quickest"].items()],
    }


def test_shipped_files_are_chosen_from_the_measured_times(few_tiles: ModuleType) -> None:
    written = dict(few_tiles.tables(RESULTS))
    assert set(written) == {file.name for file in TILES.glob("*.json")}
    for name, text in written.items():
        assert (TILES / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("model", "sets"), [("qwen3_30b_a3b", 4), ("moonlight_16b_a3b", 3)])
def test_every_number_of_tokens_has_nearly_its_quickest_tiles(
    few_tiles: ModuleType, model: str, sets: int
) -> None:
    table = few_tiles.choose(RESULTS[model])
    assert len({tuple(tiles.values()) for tiles in table.values()}) == sets
    for line in RESULTS[model]:
        times = few_tiles.times(line)
        chosen = tuple(table[str(line["tokens"])].values())
        assert times[chosen] <= few_tiles.WITHIN * min(times.values())


def test_one_set_is_taken_where_it_is_good_for_all(few_tiles: ModuleType) -> None:
    """The quickest of one number of tokens is left out then; few tokens get the narrowest set."""
    rows = [
        row(16, WIDE, 2.0, quickest={NARROW: 1.0, OTHER: 1.005}),
        row(256, WIDE, 1.0, quickest={OTHER: 1.009, NARROW: 1.5}),
    ]
    table = few_tiles.choose(rows)
    assert {tuple(tiles.values()) for tiles in table.values()} == {OTHER}
    rows[1] = row(256, WIDE, 1.0, quickest={OTHER: 1.2, NARROW: 1.5})
    table = few_tiles.choose(rows)
    assert tuple(table["16"].values()) == NARROW and tuple(table["256"].values()) == WIDE
    assert tuple(table["1"].values()) == NARROW


def test_many_rows_apart_are_no_search_without_end(few_tiles: ModuleType) -> None:
    """Each needs tiles of its own: as many sets as rows, found without trying smaller ones."""
    rows = [
        row(n, WIDE, 9.0, quickest={(n, k, 128, 1, 4, 3): 1.0 + 1e-4 * k for k in range(12)})
        for n in range(1, 9)
    ]
    table = few_tiles.choose(rows)
    assert [tuple(table[str(n)].values())[:2] for n in range(1, 9)] == [(n, 0) for n in range(1, 9)]

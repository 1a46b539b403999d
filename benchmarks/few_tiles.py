"""Choose few tiles for vLLM's kernel of FP8 experts from the times of ``tune_experts.py``.

    python benchmarks/few_tiles.py [benchmarks/results/expert_tiles_h200.json]

Triton compiles the kernel for each set of tiles while an engine starts, one after the other, for
both products of the experts. So of all sets the fewest are taken with which every number of tokens
has one that is at most WITHIN times as slow as its quickest. This writes the files of
``vllm_fp8rl/kernels/expert_tiles`` anew; ``tune_experts.py`` chooses in the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from fp8rl.models.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[1]
SHAPES, TABLES = ROOT / "benchmarks" / "shapes", ROOT / "vllm_fp8rl" / "kernels" / "expert_tiles"
KEYS = (
    "BLOCK_SIZE_M",
    "BLOCK_SIZE_N",
    "BLOCK_SIZE_K",
    "GROUP_SIZE_M",
    "num_warps",
    "num_stages",
)
WITHIN = 1.01
MOST_COVERS = 10_000
"""Sets of the smallest size that are compared; of more, the first, which have quick tiles."""
FEW = (1, 2, 4, 8)
"""Tokens that were not measured: they get the narrowest tiles of the set, since they make few."""
Tiles = tuple[int, ...]
"""In the order of KEYS."""


def times(row: Mapping[str, Any]) -> dict[Tiles, float]:
    """Milliseconds by tiles of one number of tokens: the quickest ones and vLLM's own."""
    found = {tuple(row["default"][key] for key in KEYS): row["default_ms"]}
    for milliseconds, *tiles in row["quickest"]:
        found[tuple(tiles)] = min(milliseconds, found.get(tuple(tiles), milliseconds))
    return found


def choose(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the tiles by number of tokens, in vLLM's format.

    Args:
        rows: of ``tune_experts.py``, one for each number of tokens.
    """
    measured = {row["tokens"]: times(row) for row in rows}
    good = {
        tokens: [
            tiles
            for tiles in sorted(found, key=lambda each: (found[each], each))
            if found[tiles] <= WITHIN * min(found.values())
        ]
        for tokens, found in measured.items()
    }

    def best(tokens: int, chosen: frozenset[Tiles]) -> Tiles:
        return next(tiles for tiles in good[tokens] if tiles in chosen)

    def slowness(chosen: frozenset[Tiles]) -> float:
        return sum(
            measured[tokens][best(tokens, chosen)] / min(found.values())
            for tokens, found in measured.items()
        )

    found: list[frozenset[Tiles]] = []
    size = 0
    while not found:
        size += 1
        covers = islice(_covers(list(good.values()), frozenset(), size), MOST_COVERS)
        found = list(set(covers))
    chosen = min(found, key=lambda each: (slowness(each), sorted(each)))
    few = min(chosen, key=lambda tiles: tiles[:2])
    table = dict.fromkeys(FEW, few) | {tokens: best(tokens, chosen) for tokens in measured}
    return {str(tokens): dict(zip(KEYS, tiles, strict=True)) for tokens, tiles in table.items()}


def _covers(
    good: Sequence[Sequence[Tiles]], chosen: frozenset[Tiles], left: int
) -> Iterator[frozenset[Tiles]]:
    """Yield the sets that have a good one for everything, with at most ``left`` more tiles."""
    open_ones = [each for each in good if chosen.isdisjoint(each)]
    apart: list[frozenset[Tiles]] = []  # each of these needs tiles of its own
    for each in sorted(open_ones, key=len):
        if all(other.isdisjoint(each) for other in apart):
            apart.append(frozenset(each))
    if not open_ones:
        yield chosen
    elif len(apart) <= left:
        for tiles in min(open_ones, key=len):
            yield from _covers(open_ones, chosen | {tiles}, left - 1)


def text(table: Mapping[str, Mapping[str, int]], triton: str) -> str:
    """Return a file of vLLM's format, a line for each number of tokens."""
    lines = [f' "triton_version": "{triton}"']
    lines += [f' "{tokens}": {json.dumps(tiles)}' for tokens, tiles in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def tables(results: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the file of each model in a file of results, all on one GPU."""
    gpu = results["gpu"].replace(" ", "_")
    for model, rows in results.items():
        file = SHAPES / f"{model}.json"
        if not file.is_file():
            continue
        spec = ModelSpec.of(json.loads(file.read_text(encoding="utf-8")))
        experts, width = spec.experts, spec.numbers["moe_intermediate_size"]
        name = f"E={experts},N={width},device_name={gpu},dtype=fp8_w8a8,block_shape=[128,128].json"
        yield name, text(choose(rows), results["versions"]["triton"])


def main() -> None:
    default = ROOT / "benchmarks" / "results" / "expert_tiles_h200.json"
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    for name, written in tables(json.loads(file.read_text(encoding="utf-8"))):
        (TABLES / name).write_text(written, encoding="utf-8")
        sys.stdout.write(f"{name}\n{written}")


if __name__ == "__main__":
    main()

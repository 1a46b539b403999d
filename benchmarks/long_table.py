"""A table of the runs of ``nemo_rl.py --task long``: each trainer and variant, over its seeds.

    python benchmarks/long_table.py RESULTS.json...

Results files are those of ``nemo_rl_curves.py``. "End" is the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl_curves import read, without_seed


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown, with mean ± standard deviation where a variant has seeds.

    Args:
        runs: as ``nemo_rl.py`` prints them; those without a validation are left out.
    """
    made = [run for run in runs if run.get("validation", {}).get("accuracy")]
    starts = sorted({row["start"] for run in made for row in run["positions"]})
    columns: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "steps": lambda run: run["steps"],
        "reward, step 1": lambda run: run["curves"]["train/reward"][0],
        "reward, end": _end("train/reward"),
        "validation accuracy, last": lambda run: run["validation"]["accuracy"][-1],
        "entropy, end": _end("train/approx_entropy"),
        "tokens, end": _end("train/mean_gen_tokens_per_sample"),
        "`token_mult_prob_error`": _median("train/token_mult_prob_error"),
        "`gen_kl_error`": _median("train/gen_kl_error"),
    } | {f"KL from token {start}": _kl(start) for start in starts}
    lines = [f"| run | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    for name in dict.fromkeys(map(without_seed, made)):
        seeds = [run for run in made if without_seed(run) == name]
        cells = [_cell([find(run) for run in seeds]) for find in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _end(tag: str) -> Callable[[Mapping[str, Any]], float]:
    def mean(run: Mapping[str, Any]) -> float:
        values = run["curves"][tag]
        return statistics.fmean(values[-max(len(values) // 4, 1) :])

    return mean


def _median(tag: str) -> Callable[[Mapping[str, Any]], float]:
    return lambda run: statistics.median(run["curves"][tag])


def _kl(start: int) -> Callable[[Mapping[str, Any]], float | None]:
    def find(run: Mapping[str, Any]) -> float | None:  # not all runs have answers as long
        found = {row["start"]: row["kl"] for row in run["positions"]}
        return found.get(start)

    return find


def _cell(values: Sequence[float | None]) -> str:
    """Return the mean and the deviation of the seeds that have a value."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    told = f"{statistics.fmean(known):.5g}"
    return told if len(known) == 1 else f"{told} ± {statistics.stdev(known):.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    sys.stdout.write(table(read(parser.parse_args().results)) + "\n")


if __name__ == "__main__":
    main()

"""Draw what ``nemo_rl.py`` has printed: reward and ``token_mult_prob_error``, step by step.

    python benchmarks/nemo_rl_curves.py RESULTS.json... --out FILE.svg

A results file holds a run a line, or one object with a list of ``runs``. Each trainer has a row of
panels; runs of one variant have one colour everywhere.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = {
    "train/reward": "reward, mean of a step",
    "train/token_mult_prob_error": "token_mult_prob_error",
}
COLOURS = ("#444444", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")
WIDTH, HEIGHT = 4.6, 2.6
"""Inches of a panel."""


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs of results files, in order."""
    runs: list[dict[str, Any]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            runs += [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            runs += value.get("runs", [value])
    return runs


def draw(runs: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write one figure of the runs that have made steps; its suffix chooses the format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp8rl"  # so that the same runs give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text, which is smaller than its outlines
    matplotlib.rcParams["font.sans-serif"] = ["DejaVu Sans"]
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    drawn = [run for run in runs if run.get("curves")]
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for run in drawn:
        rows.setdefault(run["run"].partition("-")[0], []).append(run)
    variants = list(dict.fromkeys(run["run"].partition("-")[2] for run in drawn))
    size = (WIDTH * len(PANELS), HEIGHT * max(len(rows), 1))
    figure, axes = pyplot.subplots(
        max(len(rows), 1), len(PANELS), figsize=size, squeeze=False, layout="constrained"
    )
    for panels, (trainer, mine) in zip(axes, rows.items(), strict=False):
        for panel, (tag, title) in zip(panels, PANELS.items(), strict=True):
            for run in mine:
                variant = run["run"].partition("-")[2]
                values = run["curves"].get(tag, [])
                colour = COLOURS[variants.index(variant) % len(COLOURS)]
                steps = range(1, len(values) + 1)
                panel.plot(steps, values, ".-", color=colour, label=variant, lw=1, ms=3)
            panel.set_title(f"{trainer}: {title}", fontsize=9)
            panel.tick_params(labelsize=8)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
        panels[0].legend(fontsize=8)
    for panel in axes[-1]:
        panel.set_xlabel("step", fontsize=8)
    metadata = {"Date": None} if file.suffix == ".svg" else None
    figure.savefig(file, metadata=metadata)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw(read(options.results), options.out)


if __name__ == "__main__":
    main()

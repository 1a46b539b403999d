"""Draw what ``nemo_rl.py`` has printed: reward and mismatch by step, and more of long answers.

    python benchmarks/nemo_rl_curves.py RESULTS.json... --out FILE.svg

A results file holds a run a line, or one object with a list of ``runs``. Each trainer has a row of
panels; runs of one variant have one colour everywhere, whatever their seeds. Runs of long answers
also have validation accuracy and entropy by step, and ``gen_kl_error`` by position.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Points = tuple[Sequence[float], Sequence[float]]

LEAST_TOKENS = 10_000
"""Tokens of a range of positions whose mean is drawn."""


def by_step(tag: str, less: float = 0.0) -> Callable[[Mapping[str, Any]], Points]:
    """Return what finds the points of a curve in a run: steps and values, minus ``less``."""

    def points(run: Mapping[str, Any]) -> Points:
        values = [value - less for value in run["curves"].get(tag, [])]
        return range(1, len(values) + 1), values

    return points


def validation(run: Mapping[str, Any]) -> Points:
    """Return steps and accuracies of a run's validations, if it has any."""
    found = run.get("validation", {})
    return found.get("steps", []), found.get("accuracy", [])


def kl_by_position(run: Mapping[str, Any]) -> Points:
    """Return where each range of positions begins and the KL there, if the run has them.

    A range that few answers reach, as behind the longest right one, is left out.
    """
    found = [row for row in run.get("positions", []) if row["tokens"] >= LEAST_TOKENS]
    return [row["start"] for row in found], [row["kl"] for row in found]


# Errors have a logarithmic axis: a single rare token can make the error of a step thousands of
# times as large as that of others. A step without any error has no point there.
PANELS = {
    "reward, mean of a step": by_step("train/reward"),
    "token_mult_prob_error - 1": by_step("train/token_mult_prob_error", less=1.0),
}
LONG_PANELS = {
    "validation accuracy": validation,
    "entropy, nats a token": by_step("train/approx_entropy"),
    "gen_kl_error by position": kl_by_position,
}
"""Drawn where a run has a validation."""
COLOURS = ("#444444", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")
WIDTH, HEIGHT = 4.6, 2.6
"""Inches of a panel."""
COLUMNS = 3
"""Panels side by side; more of a trainer go below."""
MARKED = 40
"""Points of a run that are marked; more are a line alone."""


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs of results files, in order; of a resumed run the last, which has all its steps."""
    runs: list[dict[str, Any]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            runs += [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            runs += value.get("runs", [value])
    whole = {run["run"]: run for run in runs if "validation" in run}
    return [run for run in runs if whole.get(run["run"], run) is run]


def without_seed(run: Mapping[str, Any]) -> str:
    """Return the name of a run, its trainer and variant, without the seed of long answers."""
    return re.sub(r"-long-\d+$", "", run["run"])


def variant(run: Mapping[str, Any]) -> str:
    """Return the name of a run without its trainer and the seed of long answers."""
    return without_seed(run).partition("-")[2]


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
    panels = PANELS | (LONG_PANELS if any(run.get("validation") for run in drawn) else {})
    variants = list(dict.fromkeys(map(variant, drawn)))
    columns = min(len(panels), COLUMNS)
    height = -(-len(panels) // columns)
    size = (WIDTH * columns, HEIGHT * max(len(rows), 1) * height)
    figure, axes = pyplot.subplots(
        max(len(rows), 1) * height, columns, figsize=size, squeeze=False, layout="constrained"
    )
    for number, (trainer, mine) in enumerate(rows.items()):
        line = list(axes[number * height : (number + 1) * height].flat)
        for panel, (title, points) in zip(line, panels.items(), strict=False):
            for run in mine:
                found = points(run)
                colour = COLOURS[variants.index(variant(run)) % len(COLOURS)]
                line_style = ".-" if len(found[0]) <= MARKED else "-"
                panel.plot(*found, line_style, color=colour, label=variant(run), lw=1, ms=3)
            panel.set_title(f"{trainer}: {title}", fontsize=9)
            if "error" in title:
                panel.set_yscale("log")
            panel.set_xlabel("position" if "position" in title else "step", fontsize=8)
            panel.tick_params(labelsize=8)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
        handles, labels = line[0].get_legend_handles_labels()
        legend = dict(zip(labels, handles, strict=True))
        names = line[0].legend(legend.values(), legend, fontsize=7)
        names.set_in_layout(False)  # a long name may cover a panel, and shall not push them apart
        for empty in line[len(panels) :]:
            empty.set_axis_off()
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

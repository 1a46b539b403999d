"""The report's plots, as inline SVG that takes its colours of text and grid from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fp8rl_demo.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; markers and dashes differ too.
STYLES = {
    "bf16": ("#0072B2", "-", "o"),
    "fp8-rollout": ("#E69F00", (0, (5, 1.5)), "s"),
    "fp8": ("#009E73", (0, (1.5, 1.2)), "^"),
    "exact": ("#CC79A7", "-.", "D"),
}
_OTHER = [("#56B4E9", "-", "v"), ("#D55E00", "--", "P")]
PHASE_COLOURS = ("#4477AA", "#66CCEE", "#228833", "#CCBB44", "#EE6677", "#AA3377", "#999999")
# Placeholders, because matplotlib needs colours; the page's own replace them.
_INK, _GRID = "#010203", "#040506"
_WINDOW = 5


Points = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Plot:
    """A plot of one value over the steps of all runs."""

    title: str
    caption: str
    axis: str
    points: Callable[[Run], Points]
    """Finished steps and values of a run."""
    kind: Literal["share", "smoothed share", "smoothed log", "ratio"]
    """A share begins at 0; smoothed, its steps are dots and its line is a mean over five steps."""
    reference: bool = False
    """A line at the mean of BF16."""


def _validation(run: Run) -> Points:
    return [step for step, _ in run.validation], [100 * value for _, value in run.validation]


PLOTS = (
    Plot(
        "Reward",
        "Share of sampled answers that are right. Dots are single steps, lines the mean of five.",
        "reward (share of right samples)",
        lambda run: run.series("reward"),
        "smoothed share",
    ),
    Plot(
        "Accuracy",
        "Right greedy answers on problems that are never trained on.",
        "validation accuracy (%)",
        _validation,
        "share",
    ),
    Plot(
        "Mismatch: KL divergence",
        "How far vLLM's policy is from Megatron's on the sampled tokens; dots are single steps, "
        "lines the mean of five. The thin line is BF16's mean over all steps: it is not zero, "
        "because two engines round in different places. Steps with a KL of 0 are not drawn.",
        "KL, k3 (nats/token)",
        lambda run: run.series("mismatch", "kl_k3"),
        "smoothed log",
        reference=True,
    ),
    Plot(
        "Mismatch: capped probability error",
        "Mean of exp(|Δ log p|) over the sampled tokens, at most 10 for a token; 1 is perfect "
        "agreement.",
        "capped_prob_error (ratio)",
        lambda run: run.series("mismatch", "capped_prob_error"),
        "ratio",
    ),
)


def style_of(name: str, names: Sequence[str]) -> tuple[str, Any, str]:
    """Return (colour, dashes, marker) of a run, the same in every plot."""
    if name in STYLES:
        return STYLES[name]
    others = [n for n in names if n not in STYLES]
    return _OTHER[others.index(name) % len(_OTHER)]


def line_plot(plot: Plot, runs: Sequence[Run]) -> str:
    """Draw one line per run."""

    def draw(axes: Axes) -> None:
        names = [run.name for run in runs]
        for run in runs:
            colour, dashes, marker = style_of(run.name, names)
            xs, ys = plot.points(run)
            if plot.reference and run.name == "bf16" and ys:
                mean = sum(ys) / len(ys)
                axes.axhline(mean, color=colour, linewidth=0.9, alpha=0.7)
            if plot.kind.startswith("smoothed"):
                axes.plot(xs, ys, marker, color=colour, alpha=0.35, markersize=3, linewidth=0)
                ys, marker = _smooth(ys), ""
            axes.plot(xs, ys, marker=marker, color=colour, linestyle=dashes, label=run.name)
            if plot.kind == "smoothed log" and any(y > 0 for y in ys):
                axes.set_yscale("log", nonpositive="mask")
        axes.set_ylabel(plot.axis)
        if plot.kind.endswith("share"):
            axes.set_ylim(0, None)
        elif plot.kind == "ratio":
            axes.axhline(1.0, color=_INK, linewidth=0.8, alpha=0.5)
            axes.ticklabel_format(axis="y", useOffset=False)

    return _svg(plot.title, draw)


def time_plot(runs: Sequence[Run]) -> str:
    """Plot median seconds of a step, stacked by phase, one bar per run."""
    phases = list(dict.fromkeys(phase for run in runs for phase in run.seconds()))

    def draw(axes: Axes) -> None:
        names = [run.name for run in runs]
        left = [0.0] * len(runs)
        for i, phase in enumerate(phases):
            widths = [run.seconds().get(phase, 0.0) for run in runs]
            colour = PHASE_COLOURS[i % len(PHASE_COLOURS)]
            axes.barh(names, widths, left=left, color=colour, label=phase, height=0.55)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, total in enumerate(left):
            axes.annotate(
                f"{total:.2f} s", (total, y), (5, 0), textcoords="offset points", va="center"
            )
        axes.set_xlim(0, max(left) * 1.2)
        axes.set_xlabel("median time of a step (s)")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)

    return _svg("time", draw, steps=False)


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and up to four before it."""
    windows = (values[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _svg(name: str, draw: Callable[[Axes], None], *, steps: bool = True) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with _look(name):
        figure = Figure(figsize=(4.3, 3.0), layout="constrained")  # readable on a phone
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes)
        if steps:
            axes.set_xlabel("finished GRPO steps")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    # Every plot numbers its groups alike, and nothing refers to them: without ids none is double.
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    # The element around the plot describes it in words.
    return (
        svg.replace(_INK, "currentColor")
        .replace(_GRID, "var(--grid)")
        .replace("<svg ", '<svg aria-hidden="true" ', 1)
    )


@contextmanager
def _look(name: str) -> Iterator[None]:
    import matplotlib

    look: dict[Any, Any] = {
        "svg.fonttype": "none",  # keep text as text: sharp, selectable, in the page's font
        "svg.hashsalt": name,  # the same page for the same run; ids differ between plots
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.7,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "lines.linewidth": 1.9,
        "lines.markersize": 3.5,
    }
    with matplotlib.rc_context(look):
        yield

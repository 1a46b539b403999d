"""The summary of all runs, as rows of text and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8rl_demo.report.gpu_figures import GPU_FIGURES
from fp8rl_demo.report.runs import Run, load_runs

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "-"


def summary(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Return column titles and a row of text per run, with ``NOTHING`` for a missing value."""
    phases = list(dict.fromkeys(phase for run in runs for phase in run.seconds()))
    titles = [
        "precision",
        "steps",
        "reward",
        "validation accuracy",
        "KL (k3)",
        "prob. error",
        "ESS",
        "s/step",
        *phases,
    ]
    return titles, [_row(run, phases) for run in runs]


def _row(run: Run, phases: Sequence[str]) -> list[str]:
    reward = run.reward_ends()
    accuracy = (run.validation[0][1], run.validation[-1][1]) if run.validation else None
    seconds = run.seconds()
    return [
        run.name,
        str(len(run.steps)),
        f"{reward[0]:.2f}→{reward[1]:.2f}" if reward else NOTHING,
        f"{accuracy[0]:.0%}→{accuracy[1]:.0%}" if accuracy else NOTHING,
        _number(run.mean("mismatch", "kl_k3"), ".1e"),
        _number(run.mean("mismatch", "token_mult_prob_error"), ".3f"),
        _number(run.mean("mismatch", "ess"), ".3f"),
        _number(sum(seconds.values()) if seconds else None, ".2f"),
        *(_number(seconds.get(phase), ".2f") for phase in phases),
    ]


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else format(value, spec)


def _on_a_gpu() -> str:
    measured = ", ".join(f"{figure.what} {figure.gain or figure.fp8}" for figure in GPU_FIGURES)
    return (
        "A CPU simulates FP8, which takes longer; on an H100 it is faster (8B's shape, random "
        f"weights): {measured}"
    )


def terminal_table(out_dir: Path) -> Table:
    """Return the summary with one column per precision, which fits a terminal of 80 columns.

    Reward is the mean of the first and of the last five steps. Mismatch is the mean over all steps,
    phases are mean seconds per step. The caption says what FP8 gains on a GPU.

    Raises:
        ReportError: ``out_dir`` is not a folder.
    """
    from rich import box
    from rich.table import Table

    titles, rows = summary(load_runs(out_dir))
    table = Table(
        title="fp8rl demo",
        caption=f"reward: first and last five steps; times: mean seconds a step\n{_on_a_gpu()}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column(titles[0])
    for row in rows:
        table.add_column(row[0], justify="right")
    for title, *cells in zip(titles[1:], *(row[1:] for row in rows), strict=True):
        table.add_row(title, *cells)
    return table

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
    """Return column titles, a column per run, and rows of text; ``NOTHING`` is a missing value."""
    phases = list(dict.fromkeys(phase for run in runs for phase in run.seconds()))
    titles = ["steps", "reward", "validation accuracy", "KL (k3)", "capped error", "ESS"]
    titles += ["tokens/s", "s/step", *phases]
    columns = [_column(run, phases) for run in runs]
    rows = [list(row) for row in zip(titles, *columns, strict=True)]
    return ["precision", *(run.name for run in runs)], rows


def _column(run: Run, phases: Sequence[str]) -> list[str]:
    reward = run.reward_ends()
    accuracy = (run.validation[0][1], run.validation[-1][1]) if run.validation else None
    seconds = run.seconds()
    return [
        str(len(run.steps)),
        f"{reward[0]:.2f}→{reward[1]:.2f}" if reward else NOTHING,
        f"{accuracy[0]:.0%}→{accuracy[1]:.0%}" if accuracy else NOTHING,
        _number(run.mean("mismatch", "kl_k3"), ".1e"),
        _number(run.mean("mismatch", "capped_prob_error"), ".3f"),
        _number(run.mean("mismatch", "ess"), ".3f"),
        _number(run.tokens_per_second(), ",.0f"),
        _number(sum(seconds.values()) if seconds else None, ".2f"),
        *(_number(seconds.get(phase), ".2f") for phase in phases),
    ]


def _number(value: float | None, spec: str) -> str:
    return NOTHING if value is None else format(value, spec)


def _on_a_gpu(runs: Sequence[Run]) -> str:
    if gains := gpu_gains(runs):
        return gains
    measured = ", ".join(f"{figure.what} {figure.gain or figure.fp8}" for figure in GPU_FIGURES)
    return (
        "A CPU simulates FP8, which takes longer; on an H100 it is faster (8B's shape, random "
        f"weights): {measured}"
    )


def gpu_gains(runs: Sequence[Run]) -> str:
    """Say how much faster than BF16 the others were on this GPU; empty without both."""
    base = next((run for run in runs if run.name == "bf16" and run.seconds()), None)
    if base is None or base.device == "CPU":
        return ""
    parts = []
    for run in runs:
        now, then = run.tokens_per_second(), base.tokens_per_second()
        if run is not base and now and then:
            training = [
                sum(each.seconds().get(phase, 0.0) for phase in ("logprobs", "train"))
                for each in (base, run)
            ]
            parts.append(
                f"{run.name}: rollouts {now / then:.2f}x, training {training[0] / training[1]:.2f}x"
            )
    return f"speed over BF16 on {base.device}: {'; '.join(parts)}" if parts else ""


def terminal_table(out_dir: Path) -> Table:
    """Return the summary with one column per precision, which fits a terminal of 80 columns.

    Reward is the mean of the first and of the last five steps. Mismatch is the mean over all steps,
    phases are median seconds of a step. The caption says what FP8 gains on a GPU.
    """
    from rich import box
    from rich.table import Table

    runs = load_runs(out_dir)
    titles, rows = summary(runs)
    table = Table(
        title="fp8rl demo",
        caption="reward: first and last five steps; times: median seconds of a step\n"
        f"{_on_a_gpu(runs)}",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column(titles[0])
    for name in titles[1:]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table

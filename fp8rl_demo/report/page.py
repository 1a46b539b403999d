"""The HTML report: one file, nothing fetched, readable in light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fp8rl_demo.report import plots
from fp8rl_demo.report.gpu_figures import GPU_FIGURES, SIMULATED
from fp8rl_demo.report.runs import Run, load_runs
from fp8rl_demo.report.table import NOTHING, summary

_MOST_SAMPLES = 8


def write_report(out_dir: Path) -> Path:
    """Write ``out_dir/report.html`` from what the runs in ``out_dir`` have written so far.

    Returns:
        The file. An earlier one is replaced atomically.

    Raises:
        ReportError: ``out_dir`` is not a folder.
    """
    runs = load_runs(out_dir)
    template = Template(_asset("page.html"))
    text = template.substitute(
        style=_asset("page.css"),
        lead=_lead(runs),
        summary=_summary(runs),
        training=_training([run for run in runs if run.steps or run.validation]),
        gpu=_on_a_gpu(),
        samples=_answers(runs),
        details=_details(runs),
    )
    path = out_dir / "report.html"
    partial = out_dir / ".report.html.partial"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _lead(runs: Sequence[Run]) -> str:
    if not any(run.steps for run in runs):
        return "No GRPO step was finished yet; run the demo again."
    sentences = []
    for run in runs:
        ends = run.reward_ends()
        if ends:
            sentences.append(
                f"<b>{escape(run.name)}</b>: reward {ends[0]:.2f} → {ends[1]:.2f} "
                f"in {len(run.steps)} steps"
            )
    return "; ".join(sentences) + "."


def _summary(runs: Sequence[Run]) -> str:
    titles, rows = summary(runs)
    return _table(titles, rows, numeric=True) if rows else "<p>No run was found here.</p>"


def _training(runs: Sequence[Run]) -> str:
    if not any(run.steps for run in runs):
        return ""
    figures = [
        _figure(plot.title, plots.line_plot(plot, runs), plot.caption, _trends(plot, runs))
        for plot in plots.PLOTS
    ]
    timed = [run for run in runs if run.seconds()]
    if timed:
        caption = f"Mean over the steps of each run, on this machine. {SIMULATED}"
        svg = plots.time_plot(timed)
        figures.append(_figure("Time by phase", svg, caption, _times(timed), wide=True))
    return f'<section><h2>Training</h2><div class="figures">{"".join(figures)}</div></section>'


def _figure(title: str, svg: str, caption: str, words: str, *, wide: bool = False) -> str:
    label = escape(f"{title}. {words}", quote=True)
    kind = ' class="wide"' if wide else ""
    return (
        f'<figure{kind}><h3>{escape(title)}</h3><div role="img" aria-label="{label}">'
        f"{svg}</div><figcaption>{escape(caption)}</figcaption></figure>"
    )


def _trends(plot: plots.Plot, runs: Sequence[Run]) -> str:
    """Say where the values of each run begin and end."""
    values = {run.name: plot.points(run)[1] for run in runs}
    return "; ".join(f"{n}: from {v[0]:.4g} to {v[-1]:.4g}" for n, v in values.items() if v) + "."


def _times(runs: Sequence[Run]) -> str:
    """Say how long each phase takes in each run."""
    parts = []
    for run in runs:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in run.seconds().items())
        parts.append(f"{run.name}, seconds a step: {phases}")
    return "; ".join(parts) + "."


def _on_a_gpu() -> str:
    """Show what FP8 gains where it is not simulated."""
    titles = ("measured on a GPU", "BF16", "FP8", "gain", "conditions", "data")
    rows = [[NOTHING if cell == "" else cell for cell in astuple(figure)] for figure in GPU_FIGURES]
    return (
        f"<section><h2>Beside a GPU</h2><p>{escape(SIMULATED)} On a GPU with FP8 units it is "
        f"faster:</p>{_table(titles, rows)}</section>"
    )


def _answers(runs: Sequence[Run]) -> str:
    parts = "".join(_samples(run) for run in runs)
    if not parts:
        return ""
    return (
        f"<section><h2>Answers, before and after</h2><div class='figures'>{parts}</div></section>"
    )


def _samples(run: Run) -> str:
    """Compare greedy answers to the same problems at the first and the last validation."""
    if not run.samples:
        return ""
    first, last = run.samples[0]["step"], run.samples[-1]["step"]
    after = {row.get("prompt"): row for row in run.samples if row["step"] == last}
    rows = []
    for row in [row for row in run.samples if row["step"] == first][:_MOST_SAMPLES]:
        later = after.get(row.get("prompt"), {}) if last != first else {}
        answer = str(row.get("answer"))
        cells = [
            f"<td><code>{escape(str(row.get('prompt')))}</code></td>",
            f"<td>{escape(answer)}</td>",
        ]
        cells += [_judged(sample.get("completion"), answer) for sample in (row, later)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = ("problem", "answer", f"after {first} steps", f"after {last} steps")
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads)
    return (
        f"<div><h3>{escape(run.name)}</h3><div class='scroll'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _judged(completion: Any, answer: str) -> str:
    if completion is None:
        return f"<td>{NOTHING}</td>"
    right = str(completion) == answer
    mark = ("right", "✓") if right else ("wrong", "✗")
    visible = str(completion).replace(" ", "\u2423")  # a trailing space makes some answers wrong
    return (
        f"<td class='{mark[0]}'><code>{escape(visible) or '(nothing)'}</code> "
        f"<span role='img' aria-label='{mark[0]}'>{mark[1]}</span></td>"
    )


def _details(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        if not run.info:
            continue
        body = ""
        for key in ("recipe", "pins", "settings", "versions"):
            value = run.info.get(key)
            if isinstance(value, dict):
                body += f"<h3>{key.capitalize()}</h3>{_table(('key', 'value'), _flat(value))}"
            elif value:
                rows = [[_text(cell) for cell in row.values()] for row in value]
                body += f"<h3>{key.capitalize()}</h3>{_table(list(value[0]), rows)}"
        parts.append(f"<details><summary>{escape(run.name)}</summary>{body}</details>")
    if not parts:
        return ""
    return f"<section><h2>Recipe, pins, settings, versions</h2>{''.join(parts)}</section>"


def _flat(value: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Flatten nested settings to (dotted key, text) rows."""
    rows: list[list[str]] = []
    for key, item in value.items():
        if isinstance(item, dict) and item:
            rows += _flat(item, f"{prefix}{key}.")
        else:
            rows.append([f"{prefix}{key}", _text(item)])
    return rows


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: bool = False) -> str:
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in titles)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        body.append(f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>")
    kind = " class='numbers'" if numeric else ""
    return (
        f"<div class='scroll'><table{kind}><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )

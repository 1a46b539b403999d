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
from fp8rl_demo.report.table import NOTHING, gpu_gains, summary

_MOST_SAMPLES = 8
_MOST_SHOWN = 400
"""Characters of a prompt or an answer; all of it is in samples.jsonl."""


def write_report(out_dir: Path) -> Path:
    """Write ``out_dir/report.html`` from what the runs in ``out_dir`` have written so far."""
    runs = load_runs(out_dir)
    template = Template(_asset("page.html"))
    text = template.substitute(
        style=_asset("page.css"),
        device=escape(_device(runs)),
        what=_what(runs),
        lead=_lead(runs),
        summary=_summary(runs),
        training=_training([run for run in runs if run.steps or run.validation]),
        gpu=_on_a_gpu(_device(runs)),
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


def _device(runs: Sequence[Run]) -> str:
    return next((run.device for run in runs if run.info), "CPU")


def _what(runs: Sequence[Run]) -> str:
    """Say what was trained."""
    run = next((run for run in runs if run.model is not None), None)
    if run is None:
        return "GRPO of a small Qwen3 on arithmetic problems"
    task = run.info["settings"].get("task", "sums")
    kind = "sums in words" if task == "sums" else f"'{task}' of reasoning-gym"
    return f"GRPO of {escape(str(run.model))} on {escape(kind)}"


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
    if gains := gpu_gains(runs):
        sentences.append(escape(gains))
    return "; ".join(sentences) + "."


def _summary(runs: Sequence[Run]) -> str:
    titles, rows = summary(runs)
    return _table(titles, rows, kind="numbers") if runs else "<p>No run was found here.</p>"


def _training(runs: Sequence[Run]) -> str:
    if not any(run.steps for run in runs):
        return ""
    figures = [
        _figure(plot.title, plots.line_plot(plot, runs), plot.caption, _trends(plot, runs))
        for plot in plots.PLOTS
    ]
    timed = [run for run in runs if run.seconds()]
    if timed:
        how = SIMULATED if _device(timed) == "CPU" else "One precision ran after the other."
        caption = f"Median over the steps of each run, on this machine. {how}"
        figures.append(_figure("Time by phase", plots.time_plot(timed), caption, _times(timed)))
    return (
        f'<section><h2>Training</h2><div class="figures">{"".join(figures)}</div>'
        f"{_after_the_warm_start(runs)}</section>"
    )


def _after_the_warm_start(runs: Sequence[Run]) -> str:
    """Say what the demo's own model has learned before, and why its accuracy rises at once."""
    if any(run.model is not None for run in runs):
        return ""
    first = [row for run in runs for row in run.samples if row["step"] == 0]
    spaced = [row for row in first if row.get("completion") == f"{row.get('answer')} "]
    found = f" ({len(spaced)} of the {len(first)} first answers below)" if first else ""
    return (
        "<p class='note'>The warm start imitated right answers, half of them with a space behind. "
        f"So at the start many sums are right but for that space (\u2423){found}, and only an "
        "answer without it is rewarded. GRPO drops it within some tens of steps, which is why "
        "accuracy rises so fast; learning to add takes far longer.</p>"
    )


def _figure(title: str, svg: str, caption: str, words: str) -> str:
    label = escape(f"{title}. {words}", quote=True)
    return (
        f'<figure><h3>{escape(title)}</h3><div role="img" aria-label="{label}">'
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


def _on_a_gpu(device: str) -> str:
    """Show what FP8 gains on a GPU, with a model of common size."""
    titles = ("measured on a GPU", "BF16", "vLLM's own FP8", "fp8rl", "gain", "conditions", "data")
    rows = [[NOTHING if cell == "" else cell for cell in astuple(figure)] for figure in GPU_FIGURES]
    lead = (
        f"{SIMULATED} On a GPU with FP8 units it is faster:"
        if device == "CPU"
        else "The larger the matrices, the more FP8 gains; with 8B's:"
    )
    table = _table(titles, rows, kind="stack")
    return f"<section><h2>Beside a GPU</h2><p>{escape(lead)}</p>{table}</section>"


def _answers(runs: Sequence[Run]) -> str:
    parts = "".join(_samples(run) for run in runs)
    if not parts:
        return ""
    legend = "✓ right, ✗ wrong" + (", ␣ a space" if "␣" in parts else "")
    return (
        f"<section><h2>Answers, before and after</h2><p class='note'>To problems that are never "
        f"trained on, greedy. {legend}.</p><div class='figures'>{parts}</div></section>"
    )


def _samples(run: Run) -> str:
    """Compare greedy answers to the same problems at the first and the last validation."""
    if not run.samples:
        return ""
    first, last = run.samples[0]["step"], run.samples[-1]["step"]
    after = {row.get("prompt"): row for row in run.samples if row["step"] == last}
    heads = ("problem", "answer", f"after {first} steps", f"after {last} steps")
    rows = []
    for row in [row for row in run.samples if row["step"] == first][:_MOST_SAMPLES]:
        later = after.get(row.get("prompt"), {}) if last != first else {}
        cells = [_short(row.get("prompt")), _short(row.get("answer")), _judged(row), _judged(later)]
        titled = zip(heads, cells, strict=True)
        row_cells = "".join(f"<td data-title='{head}'>{cell}</td>" for head, cell in titled)
        rows.append(f"<tr>{row_cells}</tr>")
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads)
    return (
        f"<div><h3>{escape(run.name)}</h3><table class='stack'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _short(text: Any) -> str:
    shown = str(text)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]} …"
    return f"<code>{escape(shown) or '(nothing)'}</code>"


def _judged(row: dict[str, Any]) -> str:
    if "completion" not in row:
        return NOTHING
    text, answer = str(row["completion"]), str(row.get("answer"))
    name, mark = ("right", "✓") if row.get("right", text == answer) else ("wrong", "✗")
    if text.strip() == answer:  # a space behind may make an answer wrong
        text = text.replace(" ", "\u2423")
    return (
        f"<span class='{name}'>{_short(text)} "
        f"<span role='img' aria-label='{name}'>{mark}</span></span>"
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


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "") -> str:
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in titles)
    body = []
    for first, *rest in rows:
        cells = "".join(
            f"<td data-title='{escape(title)}'>{escape(cell)}</td>"
            for title, cell in zip(titles[1:], rest, strict=True)
        )
        body.append(f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>")
    return (
        f"<div class='scroll'><table class='{kind}'><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )

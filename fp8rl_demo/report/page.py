"""The HTML report: one file, nothing fetched, readable in light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fp8rl_demo.report import plots
from fp8rl_demo.report.runs import Run, load_runs
from fp8rl_demo.report.table import NOTHING, summary

_MOST_SAMPLES = 8


def write_report(out_dir: Path) -> Path:
    """Write ``out_dir/report.html`` from what the runs in ``out_dir`` have left so far.

    Returns:
        The file; an earlier one is replaced in one step.

    Raises:
        ReportError: ``out_dir`` is not a folder.
    """
    runs = load_runs(out_dir)
    template = Template(_asset("page.html"))
    text = template.substitute(
        style=_asset("page.css"),
        lead=_lead(runs),
        summary=_summary(runs),
        plots=_plots([run for run in runs if run.steps or run.validation]),
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


def _plots(runs: Sequence[Run]) -> str:
    if not any(run.steps for run in runs):
        return ""
    figures: list[tuple[Callable[[Sequence[Run]], str], str, str]] = [
        (
            plots.reward_plot,
            "Reward",
            "Share of sampled answers that are right. Dots are single steps, lines the mean of "
            "five.",
        ),
        (
            plots.accuracy_plot,
            "Accuracy",
            "Right greedy answers on problems that are never trained on.",
        ),
        (
            plots.kl_plot,
            "Mismatch: KL divergence",
            "How far vLLM's policy is from Megatron's on the sampled tokens. BF16 is not zero: "
            "two engines round in different places.",
        ),
        (
            plots.prob_error_plot,
            "Mismatch: probability error",
            "Mean of exp(|Δ log p|) over the sampled tokens; 1 is perfect agreement.",
        ),
        (plots.time_plot, "Time by phase", "Mean over the steps of each run, on this machine."),
    ]
    timed = [run for run in runs if run.seconds()]
    parts = []
    for draw, title, caption in figures:
        shown = timed if draw is plots.time_plot else runs
        if not shown:
            continue
        wide = ' class="wide"' if draw is plots.time_plot else ""
        label = escape(f"{title}. {_in_words(draw, shown)}", quote=True)
        parts.append(
            f'<figure{wide}><h3>{escape(title)}</h3><div role="img" aria-label="{label}">'
            f"{draw(shown)}</div><figcaption>{escape(caption)}</figcaption></figure>"
        )
    return f'<section><h2>Training</h2><div class="figures">{"".join(parts)}</div></section>'


def _in_words(draw: Callable[[Sequence[Run]], str], runs: Sequence[Run]) -> str:
    """What the plot shows, for who cannot see it."""
    keys: dict[Callable[[Sequence[Run]], str], tuple[str, ...]] = {
        plots.reward_plot: ("reward",),
        plots.kl_plot: ("mismatch", "kl_k3"),
        plots.prob_error_plot: ("mismatch", "token_mult_prob_error"),
    }
    parts = []
    for run in runs:
        if draw is plots.time_plot:
            phases = ", ".join(f"{phase} {s:.2f}" for phase, s in run.seconds().items())
            parts.append(f"{run.name}, seconds a step: {phases}")
            continue
        values = (
            [y for _, y in run.validation] if draw is plots.accuracy_plot else []
        ) or run.series(*keys.get(draw, ("",)))[1]
        if values:
            parts.append(f"{run.name}: from {values[0]:.4g} to {values[-1]:.4g}")
    return "; ".join(parts) + "."


def _answers(runs: Sequence[Run]) -> str:
    parts = "".join(_samples(run) for run in runs)
    if not parts:
        return ""
    return (
        f"<section><h2>Answers, before and after</h2><div class='figures'>{parts}</div></section>"
    )


def _samples(run: Run) -> str:
    """Greedy answers to the same problems at the first and at the last validation."""
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


def _visible(completion: str) -> str:
    return completion.replace(" ", "\u2423")  # a trailing space is what makes some answers wrong


def _judged(completion: Any, answer: str) -> str:
    if completion is None:
        return f"<td>{NOTHING}</td>"
    right = str(completion) == answer
    mark = ("right", "✓") if right else ("wrong", "✗")
    return (
        f"<td class='{mark[0]}'><code>{escape(_visible(str(completion))) or '(nothing)'}</code> "
        f"<span role='img' aria-label='{mark[0]}'>{mark[1]}</span></td>"
    )


def _details(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        info = run.info
        if not info:
            continue
        body = ""
        if isinstance(info.get("recipe"), dict):
            body += "<h3>Recipe</h3>" + _table(("key", "value"), _flat(info["recipe"]))
        if isinstance(info.get("pins"), list) and info["pins"]:
            body += "<h3>Pins</h3>" + _pins(info["pins"])
        if isinstance(info.get("settings"), dict):
            body += "<h3>Settings</h3>" + _table(("key", "value"), _flat(info["settings"]))
        if isinstance(info.get("versions"), dict):
            body += "<h3>Versions</h3>" + _table(("package", "version"), _flat(info["versions"]))
        parts.append(f"<details><summary>{escape(run.name)}</summary>{body}</details>")
    if not parts:
        return ""
    return f"<section><h2>Recipe, pins, settings, versions</h2>{''.join(parts)}</section>"


def _pins(rows: Iterable[Any]) -> str:
    shown = [row for row in rows if isinstance(row, dict)]
    titles = list(dict.fromkeys(key for row in shown for key in row))
    return _table(titles, [[_text(row.get(title)) for title in titles] for row in shown])


def _flat(value: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Nested settings as (dotted key, text) rows."""
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

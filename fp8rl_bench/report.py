"""The report of ``fp8rl bench``: tables for a terminal, and a page with three plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8rl_bench.advice import recipe_line
from fp8rl_bench.variants import VARIANTS

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "-"
EMULATED = "CPU: FP8 is emulated, no conclusions on speed."
RANDOM = "Random weights: the shape of the model alone, so nothing is said about KL."
_GIB, _KIB = 1 << 30, 1 << 10
_COLOURS = {"bf16": "#0072B2", "stock": "#E69F00", "fp8rl": "#009E73"}
_STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#5b6675;--grid:#d9dee5}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2028;--ink:#e6eaf0;--soft:#9aa6b5;
--grid:#343d49}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:760px;margin:0 auto;padding:20px 12px 40px}
h1{font-size:24px;margin:0 0 6px}h2{font-size:17px;margin:0 0 6px}p{margin:0 0 8px}
section{background:var(--card);border:1px solid var(--grid);border-radius:10px;padding:14px;
margin:14px 0}
svg{display:block;width:100%;height:auto}svg text{fill:var(--ink);font:12px system-ui,sans-serif}
.soft{color:var(--soft);font-size:13px}.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;width:100%}
th,td{padding:5px 8px 5px 0;border-bottom:1px solid var(--grid);text-align:right}
th:first-child{text-align:left}code{overflow-wrap:anywhere}
"""

Grid = tuple[str, list[str], list[list[str]]]
"""Title, columns and rows of text; the first column names the row."""


def grids(report: Mapping[str, Any]) -> list[Grid]:
    """Return the report's tables: rollouts by variant, then a layer of the trainer."""
    rows, training = report["variants"], report["training"]
    bf16 = rows.get("bf16", {}).get("tokens_per_second")

    def over(row: Mapping[str, Any]) -> str:
        speed = row.get("tokens_per_second")
        return f"{median(speed) / median(bf16):.2f}" if speed and bf16 else NOTHING

    def at(row: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
        return show(row[key]) if row.get(key) else NOTHING

    def metric(found: Mapping[str, Any] | None, key: str, form: str) -> str:
        return format(found[key], form) if found else NOTHING

    def mismatch(kind: str, name: str) -> Mapping[str, Any] | None:
        return training.get(kind, {}).get(name)

    cells: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
        "tokens/s": lambda _, r: at(r, "tokens_per_second", lambda v: f"{median(v):,.0f}"),
        "over BF16": lambda _, r: over(r),
        "weights, GiB": lambda _, r: at(r, "weight_bytes", lambda v: f"{v / _GIB:.2f}"),
        "cache, KiB a token": lambda _, r: at(
            r, "cache_bytes_per_token", lambda v: f"{v / _KIB:.1f}"
        ),
        "tokens that fit": lambda _, r: at(r, "cache_tokens", lambda v: f"{v:,}"),
        "start, s": lambda _, r: at(r, "start_seconds", lambda v: f"{v:.0f}"),
        "refit, ms": lambda _, r: at(r, "refit_seconds", lambda v: f"{1e3 * median(v):.0f}"),
    }
    if not report["random"]:
        cells |= {
            "KL, engines": lambda _, r: metric(r.get("engines"), "kl_k3", ".1e"),
            "KL, trainer": lambda n, _: metric(mismatch("trainer", n), "kl_k3", ".1e"),
            "capped error": lambda n, _: metric(mismatch("trainer", n), "capped_prob_error", ".3f"),
            "KL, BF16 trainer": lambda n, _: metric(mismatch("bf16_trainer", n), "kl_k3", ".1e"),
        }
    labels = [VARIANTS[name] for name in rows]
    body = [
        [title, *(show(name, row) for name, row in rows.items())] for title, show in cells.items()
    ]
    found: list[Grid] = [(f"rollouts, {report['load']}", ["", *labels], body)]
    parts = {"linears": "linear layers", "layer": "a layer", "forward": "a layer, forward"}
    timed = {title: training[key] for key, title in parts.items() if training.get(key)}
    if timed:
        columns = list(dict.fromkeys(label for times in timed.values() for label in times))
        lines = [
            [title, *(f"{times[c]:.2f}" if c in times else NOTHING for c in columns)]
            for title, times in timed.items()
        ]
        title = f"trainer, ms of {training['tokens']:,} tokens"
        found.append((title, ["", *columns], lines))
    return found


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each thing to know: what is emulated, random, or was not measured."""
    found = [EMULATED] if report["device"] == "CPU" else []
    found += [RANDOM] if report["random"] else []
    counts = [each["tokens"] for each in report["training"].get("trainer", {}).values()]
    found += (
        [f"Each KL to the trainer is a mean of {min(counts):,} tokens or more."] if counts else []
    )
    every = {**report["variants"], "trainer": report["training"]}
    found += [
        f"{VARIANTS.get(name, 'trainer')}, {part}: {why}"
        for name, row in every.items()
        for part, why in row.get("failed", {}).items()
    ]
    return found


def tables(report: Mapping[str, Any]) -> list[Any]:
    """Return the report for a terminal: tables and sentences that rich prints."""
    from rich import box
    from rich.markup import escape as plain
    from rich.table import Table as Made

    found: list[Any] = [plain(heading(report))]
    for title, columns, rows in grids(report):
        table: Table = Made(title=plain(title), box=box.SIMPLE_HEAD, show_edge=False)
        for number, column in enumerate(columns):
            justify: Any = "right" if number else "left"
            label = plain(column).replace(", ", ",\n")
            table.add_column(label, justify=justify, no_wrap=not number)
        for row in rows:
            table.add_row(*map(plain, row))
        found.append(table)
    return found + [plain(note) for note in notes(report)]


def heading(report: Mapping[str, Any]) -> str:
    """Return model, kind of weights, device and load in one line."""
    weights = "random weights" if report["random"] else "trained weights"
    return (
        f"{report['model']} ({weights}), {report['device']}, load {report['load']}, "
        f"{report['seconds'] // 60} min {report['seconds'] % 60} s"
    )


def write_page(report: Mapping[str, Any], path: Path) -> Path:
    """Write the page, which fetches nothing, and return its path."""
    rows = report["variants"]
    speeds = [
        (name, median(row["tokens_per_second"]), f"{median(row['tokens_per_second']):,.0f}")
        for name, row in rows.items()
        if row.get("tokens_per_second")
    ]
    requests, length, tokens = map(int, report["load"].split("x"))
    held = requests * (length + tokens)
    sizes = [
        (name, size, f"{size:.2f} GiB ({row['weight_bytes'] / _GIB:.2f} weights)")
        for name, row in rows.items()
        if row.get("weight_bytes")
        for size in [(row["weight_bytes"] + held * row["cache_bytes_per_token"]) / _GIB]
    ]
    trainer = report["training"].get("trainer", {})
    kl = [(n, trainer[n]["kl_k3"], f"{trainer[n]['kl_k3']:.1e}") for n in rows if n in trainer]
    emulated = f" {EMULATED}" if report["device"] == "CPU" else ""
    parts = [
        _plot("Speed", speeds, f"Output tokens per second of rollouts; more is better.{emulated}"),
        _plot("Memory", sizes, f"Weights, and the cache of {held:,} tokens, the whole load."),
        _plot(
            "KL",
            kl,
            RANDOM
            if report["random"]
            else "KL of rollout and trainer (k3, nats a token) on answers to real prompts; less is "
            "better, and BF16's is what two engines differ by anyway.",
        ),
    ]
    parts += [_grid(grid) for grid in grids(report)]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    remarks = "".join(f"<p class='soft'>{escape(note)}</p>" for note in notes(report))
    line = recipe_line(report["recipe"])
    recipe = f"<p><code>{escape(line)}</code></p>" if line else ""
    path.write_text(
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>fp8rl bench</title>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<style>{_STYLE}</style></head><body><main><h1>fp8rl bench</h1>"
        f"<p>{escape(heading(report))}</p><section><h2>What to choose</h2>"
        f"<p>{escape(report['advice'])}</p>{recipe}</section>{''.join(parts)}{remarks}"
        f"<p class='soft'>{escape(versions)}</p></main></body></html>\n",
        encoding="utf-8",
    )
    return path


def _grid(grid: Grid) -> str:
    title, columns, rows = grid
    head = "".join(f"<th scope='col'>{escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr><th scope='row'>{escape(row[0])}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return (
        f"<section><h2>{escape(title)}</h2><div class='scroll'><table><thead><tr>{head}</tr>"
        f"</thead><tbody>{body}</tbody></table></div></section>"
    )


def _plot(title: str, bars: Sequence[tuple[str, float, str]], caption: str) -> str:
    """Draw a bar for each variant, with its label above it, which a phone has room for."""
    if not bars:
        return f"<section><h2>{title}</h2><p class='soft'>{escape(caption)}</p></section>"
    most = max(value for _, value, _ in bars) or 1.0
    drawn, words = [], []
    for number, (name, value, text) in enumerate(bars):
        y, width = 44 * number, max(2.0, 346 * value / most)
        label = f"{VARIANTS[name]}: {text}"
        colour = _COLOURS[name.partition("-")[0]]
        words.append(label)
        drawn.append(
            f"<text x='0' y='{y + 13}'>{escape(label)}</text>"
            f"<rect x='0' y='{y + 19}' width='{width:.1f}' height='16' rx='3' fill='{colour}'/>"
        )
    return (
        f"<section><h2>{title}</h2><div role='img' aria-label=\"{escape('; '.join(words))}\">"
        f"<svg aria-hidden='true' viewBox='0 0 348 {44 * len(bars)}'>{''.join(drawn)}</svg></div>"
        f"<p class='soft'>{escape(caption)}</p></section>"
    )

"""Tables and problems on the terminal."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp8rl.plugins.adapters import Diagnosis, Section


def engine_table(name: str, diagnosis: Diagnosis) -> Table:
    table = Table(title=name, show_header=False, min_width=40)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("installed", diagnosis.installed or "[yellow]no[/yellow]")
    table.add_row("tested with", ", ".join(diagnosis.supported) or "-")
    for key, value in diagnosis.facts.items():
        table.add_row(key, escape(value))
    state = "[red]problems[/red]" if diagnosis.problems else "[green]ok[/green]"
    table.add_row("state", state if diagnosis.installed else "[yellow]not installed[/yellow]")
    return table


def section_table(section: Section) -> Table:
    table = Table(title=section.title, show_header=any(section.columns), min_width=40)
    for number, heading in enumerate(section.columns):
        table.add_column(heading, overflow="fold", style=None if number else "bold")
    for row in section.rows:
        table.add_row(*map(escape, row))
    return table


def print_problems(console: Console, problems: list[str]) -> None:
    """Print one line for each problem, and end with exit code 1 if there are any."""
    for problem in problems:
        console.print(f"Problem: {problem}", style="red", markup=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)

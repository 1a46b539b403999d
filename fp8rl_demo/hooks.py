"""The demo's hook of fp8rl: ``fp8rl demo``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``fp8rl demo`` to the command line."""
    from fp8rl_demo.command import demo

    app.command()(demo)

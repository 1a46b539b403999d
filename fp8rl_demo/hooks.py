"""What the demo offers through fp8rl's plugin contract."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """``fp8rl demo``."""
    from fp8rl_demo.command import demo

    app.command()(demo)

"""The hook of fp8rl that adds ``fp8rl bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8rl import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``fp8rl bench`` to the command line."""
    from fp8rl_bench.command import bench

    app.command()(bench)

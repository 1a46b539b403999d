"""The ``fp8rl`` command line."""

from fp8rl.cli.app import build_app, main

__all__ = ["build_app", "main"]

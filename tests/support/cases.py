"""Cases of a script that has its engine in a process of its own, each a test of its own outside."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from traceback import TracebackException
from typing import Any

import pytest


def names_of(script: Path) -> list[str]:
    """Functions of a script that ``@case`` marks, in order; the script is not imported."""
    text = script.read_text(encoding="utf-8")
    return re.findall(r"^@case\n(?:async )?def (\w+)", text, re.MULTILINE)


class Cases(dict[str, Callable[..., Any]]):
    """Cases by name; a script marks functions by ``case = Cases()``."""

    def __call__(self, run: Callable[..., Any]) -> None:
        self[run.__name__] = run

    async def run_all(self, served: Any, between: Callable[[], Any]) -> dict[str, str]:
        """Run every case with ``served``, and ``between`` before each but the first.

        Returns:
            Name of each case -> how it failed, with local variables, or nothing.
        """
        found: dict[str, str] = {}
        for name, run in self.items():
            try:
                if found:
                    await _ended(between())
                await _ended(run(served))
                found[name] = ""
            except (Exception, asyncio.CancelledError, pytest.fail.Exception) as error:
                told = TracebackException.from_exception(error, capture_locals=True)
                text = "".join(told.format())
                found[name] = re.sub(r"tensor\(\[[^)]*\)", "tensor", text)[-4000:]
        return found


async def _ended(done: Any) -> None:
    if inspect.isawaitable(done):
        await done

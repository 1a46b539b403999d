"""Programs under ``benchmarks/``, which are no package, as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a program anew; the folder leaves the path with ``monkeypatch``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)

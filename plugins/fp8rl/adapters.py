"""What an engine package tells ``fp8rl doctor`` about its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fp8rl.recipe import Recipe


@dataclass(frozen=True)
class Section:
    """A table of a diagnosis."""

    title: str
    columns: tuple[str, ...]
    """Headings; all empty where the first column names what the second says."""
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Diagnosis:
    """State of one engine on this machine."""

    installed: str | None
    """Version found, or None."""
    supported: tuple[str, ...]
    """Versions this release was tested with."""
    facts: dict[str, str] = field(default_factory=dict)
    """Further rows, e.g. device, attention backend."""
    problems: tuple[str, ...] = ()
    """One sentence each, with the remedy; empty when all is well. For an engine that is not
    installed: how to install it, told to those who ask for this engine by name."""
    sections: tuple[Section, ...] = ()
    """What does not fit into a row, e.g. the kernel of each kind of layer."""


@dataclass(frozen=True)
class EngineAdapter:
    """An engine and how to look at it without starting it."""

    name: str
    diagnose: Callable[[], Diagnosis]
    examine: Callable[[Path, Recipe, int], Diagnosis] | None = None
    """Likewise what the engine would do with a model (a folder with a ``config.json``), a recipe
    and a tensor parallel size: ``sections`` and ``problems``. May import the engine."""

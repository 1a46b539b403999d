"""What an engine package tells ``fp8rl doctor`` about its engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class EngineAdapter:
    """An engine and how to look at it without starting it."""

    name: str
    diagnose: Callable[[], Diagnosis]

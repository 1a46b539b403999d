"""What a seam relies on, and the comparison with what is installed."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError

KNOWN = "7ea279a (22 August 2026)"
"""Commit of NeMo RL's main branch that the seams were written for."""


@dataclass(frozen=True)
class Upstream:
    """A function, or ``Class.method``, or class of a module of NeMo RL."""

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    """Names in order; None for a class whose constructor the seam does not look at."""


def resolve(module: ModuleType, upstream: Upstream) -> Any:
    """The object that ``upstream`` names.

    Raises:
        UnsupportedError: it does not exist, or has other parameters.
    """
    found: Any = module
    for part in upstream.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UnsupportedError(
                f"{upstream.module}.{upstream.name} does not exist; NeMo RL {KNOWN} has it."
            )
    if upstream.parameters is not None:
        actual = tuple(inspect.signature(found).parameters)
        if actual != upstream.parameters:
            raise UnsupportedError(
                f"{upstream.module}.{upstream.name} takes ({', '.join(actual)}), not "
                f"({', '.join(upstream.parameters)}) as in NeMo RL {KNOWN}."
            )
    return found

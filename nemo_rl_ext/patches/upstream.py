"""What a seam relies on, and the comparison with what is installed.

What a seam puts in the place of a function is a plain function with its name
(``functools.wraps``), no proxy: Ray pickles the class of an actor with the functions that its
module has imported, those by name, and a proxy not at all.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError

KNOWN = "7ea279a (22 August 2026)"
"""Commit of NeMo RL's main branch that the seams were written for."""

_OF_RAY = "_ray_trace_ctx"
"""Parameter that Ray adds to the signatures of an actor's methods, inherited ones too."""


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
    if _hidden(found):
        compare_source(sys.modules[upstream.module.split(".")[0]].__path__[0], upstream)
    elif upstream.parameters is not None:
        parameters = inspect.signature(found).parameters
        _compare(upstream, tuple(name for name in parameters if name != _OF_RAY))
    return found


def _hidden(function: Any) -> bool:
    """Whether a decorator's function stands here that does not say what it wraps (``nsys.py``)."""
    name = getattr(function, "__qualname__", "")
    return "<locals>" in name and not hasattr(function, "__wrapped__")


def compare_source(package: str, upstream: Upstream) -> None:
    """:func:`resolve` by reading, for a module that this process cannot or need not import.

    Args:
        package: folder of ``nemo_rl``.
        upstream: a function or method.

    Raises:
        UnsupportedError: as :func:`resolve`.
    """
    file = Path(package, *upstream.module.split(".")[1:]).with_suffix(".py")
    node: Any = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None
    for part in upstream.name.split("."):
        members = [n for n in getattr(node, "body", ()) if getattr(n, "name", None) == part]
        if not members:
            raise UnsupportedError(
                f"{upstream.module}.{upstream.name} does not exist; NeMo RL {KNOWN} has it."
            )
        node = members[-1]
    given = node.args
    actual = (*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs)
    _compare(upstream, tuple(a.arg for a in (*actual, *filter(None, [given.kwarg]))))


def _compare(upstream: Upstream, actual: tuple[str, ...]) -> None:
    if actual != upstream.parameters:
        raise UnsupportedError(
            f"{upstream.module}.{upstream.name} takes ({', '.join(actual)}), not "
            f"({', '.join(upstream.parameters or ())}) as in NeMo RL {KNOWN}."
        )

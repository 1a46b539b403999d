"""What a patch or a subclass relies on in NeMo RL, and the comparison with what is installed.

What a patch puts in the place of a function is a plain function with the same name
(``functools.wraps``), not a proxy: Ray pickles the class of an actor with the functions that its
module has imported, functions by name, and it cannot pickle a proxy.
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
"""Commit of NeMo RL's main branch that the patches were written for."""


@dataclass(frozen=True)
class Upstream:
    """A function, method (``Class.method``), class or variable of a module of NeMo RL."""

    module: str
    name: str
    parameters: str | None = None
    """Names of the parameters in order, as in "self, data"; None for what is not called."""


def resolve(module: ModuleType, upstream: Upstream) -> Any:
    """Return the object of an imported module that ``upstream`` names.

    Raises:
        UnsupportedError: it does not exist, or has other parameters.
    """
    found: Any = module
    for part in upstream.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise _missing(upstream)
    if _hidden(found):
        compare_source(sys.modules[upstream.module.split(".")[0]].__path__[0], upstream)
    elif upstream.parameters is not None:
        _compare(upstream, list(inspect.signature(found).parameters))
    return found


def _hidden(function: Any) -> bool:
    """Whether this is a decorator's function that does not say what it wraps (``nsys.py``)."""
    name = getattr(function, "__qualname__", "")
    return "<locals>" in name and not hasattr(function, "__wrapped__")


def compare_source(package: str, upstream: Upstream) -> None:
    """Compare as :func:`resolve`, but read the source of a module that need not be importable.

    Args:
        package: folder of ``nemo_rl``.
        upstream: what is to be found there.

    Raises:
        UnsupportedError: it does not exist, or has other parameters.
    """
    file = Path(package, *upstream.module.split(".")[1:]).with_suffix(".py")
    node: Any = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None
    for part in upstream.name.split("."):
        members = [n for n in getattr(node, "body", ()) if part in _names(n)]
        if not members:
            raise _missing(upstream)
        node = members[-1]
    if upstream.parameters is None or isinstance(node, ast.ImportFrom):
        return
    given = node.args
    actual = (*given.posonlyargs, *given.args, *filter(None, [given.vararg]), *given.kwonlyargs)
    _compare(upstream, [a.arg for a in (*actual, *filter(None, [given.kwarg]))])


def _names(node: Any) -> set[str | None]:
    """Names that a statement of a module or class defines or imports."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}


def _compare(upstream: Upstream, parameters: list[str]) -> None:
    actual = ", ".join(parameters)
    if actual != upstream.parameters:
        raise UnsupportedError(
            f"{upstream.module}.{upstream.name} takes ({actual}), not ({upstream.parameters}) as "
            f"in NeMo RL {KNOWN}."
        )


def _missing(upstream: Upstream) -> UnsupportedError:
    return UnsupportedError(
        f"{upstream.module}.{upstream.name} does not exist; NeMo RL {KNOWN} has it."
    )

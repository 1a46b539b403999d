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
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.patch_finder import PatchFinder, module_of

KNOWN = "7ea279a (22 August 2026)"
"""Commit of NeMo RL's main branch that every :class:`Upstream` was compared with last;
docs/upgrading_nemo_rl.md has the record."""


READ_BEFOREHAND = "worker_classes"
"""Patch that relies on modules which a driver imports late or never; their source is read."""


def served(release: str | None = None) -> str:
    """Return which NeMo RL is served, to end an error about one that is not."""
    if release is None:
        release = getattr(sys.modules.get("nemo_rl"), "__version__", "of an unknown version")
    return (
        f"This NeMo RL is {release}; fp8rl serves the main branch at {KNOWN}: check out that commit"
    )


@dataclass(frozen=True)
class Upstream:
    """A function, method (``Class.method``), class or variable of a module of NeMo RL.

    Upstream may add parameters that have a default; they do not matter to a patch, which passes on
    what it is given.
    """

    module: str
    name: str
    parameters: str | None = None
    """Parameters that fp8rl relies on, as in a ``def``: those after ``*`` are passed by name, those
    with ``=...`` are sometimes left out. None for what is not called."""
    replaced: bool = False
    """A method of ours takes its place and takes these parameters alone, so no others may come."""
    unless: tuple[str, str] | None = None
    """Module and name of what a newer NeMo RL has instead; where that exists, this is not used."""


def resolve(module: ModuleType, upstream: Upstream) -> Any:
    """Return the object of an imported module that ``upstream`` names."""
    found: Any = module
    for part in upstream.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise _missing(upstream)
    if _hidden(found):
        compare_source(sys.modules[upstream.module.split(".")[0]].__path__[0], upstream)
    elif upstream.parameters is not None:
        _compare(upstream, inspect.signature(found))
    return found


def require_patches(finder: PatchFinder, key: str) -> None:
    """Raise unless all patches fit this NeMo RL, and so do the workers' base classes."""
    finder.take_up()
    package = sys.modules.get("nemo_rl")
    if package is not None:
        for upstream in module_of(READ_BEFOREHAND).UPSTREAM:
            try:
                if (upstream.module, READ_BEFOREHAND) not in finder.applied:
                    compare_source(package.__path__[0], upstream)
            except Exception as reason:  # raised below, like the others
                finder.failures.setdefault((upstream.module, READ_BEFOREHAND), reason)
    if not finder.failures:
        return
    (module, patch), error = next(iter(finder.failures.items()))
    raise UnsupportedError(
        f"'{key}' is set, but fp8rl's patch '{patch}' does not fit {module}: {error} "
        f"{served()}, or remove the key."
    ) from error


def _hidden(function: Any) -> bool:
    """Tell whether this is a decorator's function that does not say what it wraps (``nsys.py``)."""
    name = getattr(function, "__qualname__", "")
    return "<locals>" in name and not hasattr(function, "__wrapped__")


def compare_source(package: str, upstream: Upstream) -> None:
    """Compare as :func:`resolve`, but read the source of a module that need not be importable."""
    if upstream.unless is not None and find_source(package, *upstream.unless) is not None:
        return
    node = find_source(package, upstream.module, upstream.name)
    if node is None:
        raise _missing(upstream)
    if upstream.parameters is None or isinstance(node, ast.ImportFrom):
        return
    _compare(upstream, _signature(node.args))


def find_source(package: str, module: str, name: str) -> Any:
    """Return the statement that defines a dotted name in a module's source; None if none does."""
    place = Path(package, *module.split(".")[1:])
    file = next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)
    node: Any = None if file is None else ast.parse(file.read_text(encoding="utf-8"))
    for part in name.split("."):
        members = [n for n in getattr(node, "body", ()) if part in _names(n)]
        if not members:
            return None
        node = members[-1]
    return node


def _names(node: Any) -> set[str | None]:
    """Return the names that a statement of a module or class defines or imports."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
    return {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}


def _compare(upstream: Upstream, found: Signature) -> None:
    function: Any = ast.parse(f"def f({upstream.parameters}): ...").body[0]
    if not _fits(_signature(function.args), found, upstream.replaced):
        raise UnsupportedError(
            f"{upstream.module}.{upstream.name} takes ({_names_in(found)}), which does not fit "
            f"({upstream.parameters}) of NeMo RL {KNOWN}."
        )


def _fits(expected: Signature, found: Signature, replaced: bool) -> bool:
    """Tell whether calls with the expected parameters reach the parameters of the same names."""
    if replaced and len(found.parameters) != len(expected.parameters):
        return False
    needed = [p for p in expected.parameters.values() if p.default is Parameter.empty]
    for passed in (needed, expected.parameters.values()):
        by_place = [p.name for p in passed if p.kind is not Parameter.KEYWORD_ONLY]
        by_name = {p.name: p.name for p in passed if p.kind is Parameter.KEYWORD_ONLY}
        try:
            reached = found.bind(*by_place, **by_name).arguments
        except TypeError:
            return False
        if any(name != value for name, value in reached.items()):
            return False
    return True


def _signature(given: ast.arguments) -> Signature:
    """Return the parameters of a ``def`` that was read, with ``...`` as every default."""
    placed = [*given.posonlyargs, *given.args]
    required = len(placed) - len(given.defaults)
    found = [
        Parameter(a.arg, Parameter.POSITIONAL_OR_KEYWORD, default=_default(i >= required))
        for i, a in enumerate(placed)
    ]
    if given.vararg is not None:
        found.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append(
            Parameter(a.arg, Parameter.KEYWORD_ONLY, default=_default(default is not None))
        )
    if given.kwarg is not None:
        found.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


def _default(has_one: bool) -> Any:
    return ... if has_one else Parameter.empty


def _names_in(found: Signature) -> str:
    """Return the parameters without annotations, as in :attr:`Upstream.parameters`."""
    plain = [
        p.replace(annotation=Parameter.empty, default=_default(p.default is not Parameter.empty))
        for p in found.parameters.values()
    ]
    return str(Signature(plain))[1:-1].replace("Ellipsis", "...")


def _missing(upstream: Upstream) -> UnsupportedError:
    return UnsupportedError(
        f"{upstream.module}.{upstream.name} does not exist; NeMo RL {KNOWN} has it."
    )

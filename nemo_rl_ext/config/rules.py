"""Rules of single keys of upstream's: the one form of what a key may be, and what is said else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.config.keys import Sections

Allowed = tuple[Any, ...] | Callable[[Any], bool]
"""Values of a key, None where it may be left out; or whether a value is one of them."""

Rule = tuple[str, Allowed, str]
"""Path of a key, what it may be, and why or with which remedy."""

OFF = (None, False)

_A = TypeVar("_A", bound=Allowed)


def broken(
    rules: Iterable[tuple[str, _A, str]], sections: Sections
) -> Iterator[tuple[str, Any, _A, str]]:
    """Yield the rules whose key has another value, as path, value, and the rule's other parts."""
    for path, allowed, text in rules:
        section, _, key = path.rpartition(".")
        value = sections.at(section).get(key)
        if not (allowed(value) if callable(allowed) else value in allowed):  # type: ignore[operator]
            yield path, value, allowed, text


def refuse(rules: Iterable[Rule], sections: Sections) -> None:
    """Raise UnsupportedError for the first broken rule, whose text goes on after the key.

    ``{}`` in the text stands for the value.
    """
    for path, value, _, text in broken(rules, sections):
        raise UnsupportedError(f"'{path}' {text.format(value)}")

"""Any name of a module that is only imported: an empty class, whose attributes are such classes."""

from __future__ import annotations

from typing import Any


class _AnyName(type):
    def __getattr__(cls, name: str) -> type:
        return stand_in(name)


def stand_in(name: str) -> type:
    """Return a class for a name, as ``__getattr__`` of a module; it takes any arguments.

    Raises:
        AttributeError: the name is one that Python itself asks modules and classes for.
    """
    if name.startswith("__"):
        raise AttributeError(name)

    def init(self: Any, *arguments: Any, **named: Any) -> None: ...

    return _AnyName(name, (), {"__init__": init})

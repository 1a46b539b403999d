"""Modules and tensors of a checkpoint: names in errors, and experts that share a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from fp8rl.errors import UnsupportedError
from fp8rl.reading import printable

_NAMED = 3
"""Names of one kind that an error has; of the others it has the number."""


def named(names: Sequence[str]) -> str:
    """Return the first names of one kind, and the number of the others."""
    shown = ", ".join(f"'{printable(name)}'" for name in names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def with_verb(names: Sequence[str], one: str, many: str) -> str:
    """Return the names with a verb."""
    return f"{named(names)} {one if len(names) == 1 else many}"


def matrices(
    name: str, parts: Sequence[str], shape: Sequence[int]
) -> list[tuple[str, Sequence[int]]]:
    """Return the weights in a stored tensor with their shapes, or raise UnsupportedError."""
    if parts == [name]:
        return [(name, shape)]
    count = shape[0] if len(shape) == 3 else 0
    if not count or len(parts) % count or shape[1] % (each := len(parts) // count):
        raise UnsupportedError(
            f"'{name}' has shape {list(shape)}, which does not hold {len(parts)} weights of "
            "experts; correct the number of experts in config.json, or write the experts one by "
            "one with an earlier transformers."
        )
    return [(part, (shape[1] // each, shape[2])) for part in parts]


def experts_of(name: str) -> str | None:
    """Return the name of all experts of a layer together, from the name of a module of one."""
    before, found, after = name.partition(".experts.")
    return f"{before}.experts" if found and after.split(".")[0].isdecimal() else None

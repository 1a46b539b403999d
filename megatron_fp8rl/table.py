"""The resolved pins as a text for the log and as a file beside the checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from fp8rl import PinPolicy, Recipe, __version__
from fp8rl.errors import CheckpointError
from fp8rl.pinning import PinRow

FILE_NAME = "fp8rl_precision.json"
_FORMAT = 1
_NUMBERS = re.compile(r"\.(?:layers|experts)\.(\d+)")


def render(policy: PinPolicy) -> str:
    """One line for each run of layers and module that are treated alike."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for row in policy.report():
        layer = _NUMBERS.search(row.name)
        key = (_NUMBERS.sub(_star, row.name), row.precision, row.reason)
        numbers = lines.setdefault(key, [])
        if layer is not None and int(layer.group(1)) not in numbers[-1:]:
            numbers.append(int(layer.group(1)))
    parts = []
    for (name, precision, reason), numbers in lines.items():
        where = f" [layers {_runs(numbers)}]" if numbers else ""
        parts.append(f"  {name}{where}: {precision}{f' ({reason})' if reason else ''}")
    return "\n".join(parts)


def save(folder: str | os.PathLike[str], recipe: Recipe, policy: PinPolicy) -> Path:
    """Write the table to ``folder/fp8rl_precision.json``, whole or not at all.

    Returns:
        The file.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = Path(folder) / FILE_NAME
    table = {
        "format": _FORMAT,
        "fp8rl": __version__,
        "recipe": recipe.to_dict(),
        "modules": [
            {"name": row.name, "precision": row.precision, "reason": row.reason}
            for row in policy.report()
        ],
    }
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise CheckpointError(f"The precision table '{path}' cannot be written: {error}.") from None
    return path


def differences(folder: str | os.PathLike[str], policy: PinPolicy) -> dict[str, tuple[str, str]]:
    """Modules whose precision is another one than in the saved table.

    Returns:
        name -> (precision in the file, precision now); ``absent`` for a module that one lacks.

    Raises:
        CheckpointError: there is no readable table.
    """
    path = Path(folder) / FILE_NAME
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["format"] != _FORMAT:
            raise ValueError(f"format {table['format']}, not {_FORMAT}")
        then = {row["name"]: row["precision"] for row in table["modules"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"'{path}' is no readable precision table ({type(error).__name__}: {error}); give the "
            "folder that save_table() wrote to."
        ) from None
    now = _precisions(policy.report())
    pairs = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in dict.fromkeys([*then, *now])
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _precisions(rows: Iterable[PinRow]) -> dict[str, str]:
    return {row.name: row.precision for row in rows}


def _star(match: re.Match[str]) -> str:
    return match.group(0).removesuffix(match.group(1)) + "*"


def _runs(numbers: list[int]) -> str:
    """``0-3, 7`` for ascending numbers."""
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        first, last = members[0], members[-1]
        parts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(parts)

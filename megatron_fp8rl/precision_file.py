"""The resolved pins as a file beside the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fp8rl import PinPolicy, Recipe, __version__
from fp8rl.errors import CheckpointError
from fp8rl.models.families import kind_of

FILE_NAME = "fp8rl_precision.json"
_FORMAT = 1


def save(folder: str | os.PathLike[str], recipe: Recipe, policy: PinPolicy) -> Path:
    """Write the table to ``folder/fp8rl_precision.json``, whole or not at all."""
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
    """Return the modules whose precision is another one than in the saved table.

    Returns:
        name -> (precision in the file, precision now); ``absent`` for a module that one lacks.
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
    now = {row.name: row.precision for row in policy.report()}
    pairs = {
        name: (then.get(name, "absent"), now.get(name, "absent"))
        for name in dict.fromkeys([*then, *now])
    }
    # A norm is never in FP8; tables of earlier releases lack those of queries and keys.
    return {n: pair for n, pair in pairs.items() if pair[0] != pair[1] and kind_of(n) != "norm"}

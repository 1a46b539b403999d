"""The resolved pins as a file beside the checkpoint."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fp8rl import PinPolicy, Recipe, __version__
from fp8rl.errors import CheckpointError

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

"""Run the variants of a benchmark in processes of their own, one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


def in_process(variant: str, **environment: str) -> dict[str, Any]:
    """Run this script again with ``--child`` and ``--out``, for one variant.

    Args:
        variant: name of the variant.
        environment: variables to set for the process.

    Returns:
        The result that the process wrote; if it failed, with its exit status as ``failed`` and
        what it had written before.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--child", variant, "--out", str(out)]
        done = subprocess.run(command, env=os.environ | environment, check=False)
        if not done.returncode:
            return json.loads(out.read_text())
        found: dict[str, Any] = {"variant": variant}
        with suppress(FileNotFoundError, json.JSONDecodeError):  # nothing, or half of it
            found |= json.loads(out.read_text())
        return found | {"failed": done.returncode}


def save(found: object, out: Path, newest: dict[str, Any]) -> None:
    """Write what was found so far, and print the newest result."""
    out.write_text(json.dumps(found, indent=1))
    sys.stdout.write(json.dumps(newest) + "\n")
    sys.stdout.flush()

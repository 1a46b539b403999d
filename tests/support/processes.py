"""Scripts in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Variables of a process that can import this checkout, ``support`` and what lies in folders.

    Args:
        folders: come first on the process's ``sys.path``.
        variables: change or complete those of this process.
    """
    root = TESTS.parent
    before = os.environ.get("PYTHONPATH")
    path = [*folders, TESTS, root, root / "plugins", *([before] if before else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}


def run_script(
    script: Path | str,
    *arguments: object,
    timeout: float,
    folders: tuple[Path, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Run a script in a process of its own and return the JSON of its last line of output.

    Args:
        script: file, or the code itself.
        arguments: given to the script as strings.
        timeout: seconds.
        folders: further folders from which the script imports.
        variables: environment variables that change.
    """
    given = ["-c", script] if isinstance(script, str) else [str(script)]
    done = subprocess.run(
        [sys.executable, *given, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(*folders, **(variables or {})),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])

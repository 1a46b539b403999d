"""Build the site into ``out/site``; broken links and missing pages are errors. No dependencies.

    python3 tools/docs.py

mkdocs and its plugins are the extra ``docs`` of pyproject.toml. They go into ``.venv-docs``, an
environment of their own, since they need neither torch nor an engine: docstrings are read from the
source files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-docs"
STAMP = VENV / "fp8rl-docs.json"


def install(python: Path) -> None:
    """Make the environment, unless it has what pyproject.toml asks for."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["project"]["optional-dependencies"]["docs"]
    if STAMP.exists() and json.loads(STAMP.read_text(encoding="utf-8")) == wanted:
        return
    print(f"Installing {', '.join(wanted)} into {VENV.name} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    options = ["--quiet", "--disable-pip-version-check"]
    subprocess.run([str(python), "-m", "pip", "install", *options, *wanted], check=True)
    STAMP.write_text(json.dumps(wanted), encoding="utf-8")


def main() -> int:
    """Install and build; returns the exit code."""
    python = VENV / "bin" / "python"
    try:
        install(python)
        subprocess.run([str(python), "-m", "mkdocs", "build", "--strict"], cwd=ROOT, check=True)
    except subprocess.CalledProcessError as error:
        print(f"docs: {' '.join(error.cmd)}: exit code {error.returncode}", file=sys.stderr)
        return 1
    print(f"Open {ROOT / 'out' / 'site' / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

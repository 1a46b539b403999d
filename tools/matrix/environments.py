"""Make the environments: one base for each Python and torch, over it a thin one for each row.

A base holds torch, all that the engines need beside it (the extra ``cpu``) and the test tools. A
row's environment reads it through a ``.pth`` file and holds only the pinned packages and fp8rl.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from install import (
    TORCH_INDEX,
    WITHOUT_DEPENDENCIES,
    InstallError,
    pip_offers_torch,
    reachable,
    torch_options,
)

from matrix.processes import Steps
from matrix.rows import Row

STAMP, FP8RL_STAMP = "matrix.json", "matrix-fp8rl.json"
PIP_LIMIT = 1800.0
OTHERS = [pin for pin in WITHOUT_DEPENDENCIES if not pin.startswith("vllm")]


class Missing(Exception):
    """One sentence on what this machine lacks for a row."""


def find_python(version: str) -> Path:
    """Return an interpreter of a version such as ``3.12``.

    Tried in this order: the interpreters that PYTHONS names, this one, ``python3.12`` on PATH, what
    ``uv python find`` and ``pyenv`` know.

    Raises:
        Missing: there is none, with what to do.
    """
    for words in (*_named(), [sys.executable], [f"python{version}"], *_managed(version)):
        script = "import sys; print(*sys.version_info[:2], sep='.'); print(sys.executable)"
        answer = _output([*words, "-c", script]).split()
        if len(answer) == 2 and answer[0] == version:
            return Path(answer[1])
    raise Missing(
        f"Python {version} was not found; put python{version} on PATH, install it with uv or "
        "pyenv, or name it in PYTHONS."
    )


def _named() -> list[list[str]]:
    return [[name] for name in os.environ.get("PYTHONS", "").split()]


def _managed(version: str):
    """Yield interpreters that uv and pyenv have installed."""
    yield from ([path] for path in _output(["uv", "python", "find", version]).split()[:1])
    for name in _output(["pyenv", "versions", "--bare"]).split():
        if name.startswith(f"{version}."):
            prefix = _output(["pyenv", "prefix", name]).strip()
            yield [str(Path(prefix) / "bin" / f"python{version}")]


def _output(command: list[str]) -> str:
    """Return what a command prints, nothing if it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def build(row: Row, home: Path, checkout: Path, steps: Steps) -> Path:
    """Make what is missing of a row's environment and return its interpreter.

    Args:
        row: what to build.
        home: folder of all environments.
        checkout: fp8rl's sources, which the environment imports.
        steps: runs and shows the commands.

    Raises:
        Missing: no such Python, or no source tree where the row needs one.
        StepError: a command failed; the next call goes on from there.
    """
    source = _source(row)
    interpreter = find_python(row.python)
    base = _base(row, home, checkout, interpreter, steps)
    venv, pip = home / row.name, [base / "bin" / "python", "-m", "pip"]
    python = venv / "bin" / "python"
    key = _key(row.pins, str(source), str(base), (base / STAMP).read_text(encoding="utf-8"))
    if not _is_made(venv, key):
        shutil.rmtree(venv, ignore_errors=True)
        steps.run("environment", [interpreter, "-m", "venv", "--without-pip", venv], 300)
        folders = [str(_site_packages(base))]
        if source is not None:
            folders.insert(0, str(source))
            _declare_version(source, _site_packages(venv))
        (_site_packages(venv) / "matrix.pth").write_text("\n".join(folders) + "\n")
        if row.pins:
            install = [*pip, "--python", python, "install", "--no-deps", *row.pins]
            steps.run(f"pip install {' '.join(row.pins)}", install, PIP_LIMIT)
        _stamp(venv, key)
    # Only where it is another checkout or has other entry points: tests may be running there.
    key = _key(str(checkout), (checkout / "pyproject.toml").read_text(encoding="utf-8"))
    if not _is_made(venv, key, FP8RL_STAMP):
        fp8rl = ["install", "--no-deps", "--no-build-isolation", "-e", checkout]
        steps.run("pip install of fp8rl", [*pip, "--python", python, *fp8rl], PIP_LIMIT)
        _stamp(venv, key, FP8RL_STAMP)
    return python


def _source(row: Row) -> Path | None:
    if not row.source:
        return None
    path = Path(os.environ.get(row.source, "")).resolve()
    if not os.environ.get(row.source) or not (path / "megatron" / "core").is_dir():
        raise Missing(f"{row.source} does not name a source tree of Megatron-LM; set it.")
    return path


def _base(row: Row, home: Path, checkout: Path, interpreter: Path, steps: Steps) -> Path:
    """Return the base environment for the row's Python and torch."""
    base = home / f"base-py{row.python}-torch{row.torch}"
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needs = [project["dependencies"], *(extras[n] for n in ("cpu", "dev", "megatron", "nemo-rl"))]
    key = _key(needs, OTHERS, row.torch)
    with (home / f"{base.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another row may be making it
        if not _is_made(base, key):
            _make_base(base, row.torch, interpreter, checkout, steps)
            _stamp(base, key)
    return base


def _make_base(
    base: Path, torch_version: str, interpreter: Path, checkout: Path, steps: Steps
) -> None:
    shutil.rmtree(base, ignore_errors=True)
    steps.run("base environment", [interpreter, "-m", "venv", base], 300)
    python = base / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-input", "--progress-bar=off"]
    options, torch = _torch(python, torch_version)
    steps.run(f"pip install {torch}", [*install, *options, torch], PIP_LIMIT)
    packages = [f"{checkout}[cpu,dev]", torch, "hatchling"]
    steps.run("engines' dependencies and test tools", [*install, *packages], PIP_LIMIT)
    # A row installs fp8rl itself. With triton, vLLM would believe that it is on a GPU machine.
    steps.run("pip uninstall", [python, "-m", "pip", "uninstall", "-y", "fp8rl", "triton"], 300)
    steps.run(f"pip install {' '.join(OTHERS)}", [*install, "--no-deps", *OTHERS], PIP_LIMIT)


def _torch(python: Path, version: str) -> tuple[list, str]:
    """Return options for pip and the requirement: a CPU build of torch, else PyPI's build.

    PyPI's is for CUDA and runs on a CPU too, but pip loads 3 GB with it.
    """
    index = os.environ.get("FP8RL_TORCH_INDEX") or TORCH_INDEX
    try:
        offered = pip_offers_torch(python, f"{version}+cpu")
        return torch_options(offered, index, reachable), f"torch=={version}+cpu"
    except InstallError:
        return [], f"torch=={version}"


def _declare_version(source: Path, site_packages: Path) -> None:
    """Tell `importlib.metadata` the version of a source tree, over that of the base."""
    version = runpy.run_path(str(source / "megatron" / "core" / "package_info.py"))["__version__"]
    info = site_packages / f"megatron_core-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")


def _site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python*/site-packages"))


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_made(venv: Path, key: str, name: str = STAMP) -> bool:
    stamp, python = venv / name, venv / "bin" / "python"  # a link, whose target may be gone
    if not (stamp.is_file() and python.exists()):
        return False
    return json.loads(stamp.read_text(encoding="utf-8")) == {"key": key}


def _stamp(venv: Path, key: str, name: str = STAMP) -> None:
    """Mark an environment as finished; one without the mark is made anew."""
    (venv / name).write_text(json.dumps({"key": key}), encoding="utf-8")

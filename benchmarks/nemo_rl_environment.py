"""A folder with what NeMo RL's driver needs beside torch and vLLM, for a machine without network.

    .venv/bin/python benchmarks/nemo_rl_environment.py FOLDER --nemo-rl CHECKOUT
        --megatron-bridge CHECKOUT --megatron-lm CHECKOUT [--python 3.12]

NeMo RL makes an environment for each kind of worker, which needs ``uv`` and a network. With
``NEMO_RL_PY_EXECUTABLES_SYSTEM=1`` its workers run in the driver's instead. This makes one: the
wheels of ``nemo_rl_packages.txt`` for Linux on x86-64, the sources of the three checkouts,
stand-ins for wandb, mlflow and swanlab, which NeMo RL imports even where they are off, and the
metadata by which Python finds fp8rl's entry points and Ray finds what NeMo RL requires. It prints
the ``PYTHONPATH`` for the folder, this checkout and a vLLM; copy the folder as a whole to move it.
The PyTorch part of Transformer Engine is built from its source package, which
docs/nemo_rl_install.md says.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(__file__).with_name("nemo_rl_packages.txt")
SOURCE_ONLY = ("antlr4-python3-runtime",)
"""Packages without a wheel, pure Python."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
STAND_INS = ("any_name.py", "wandb.py", "mlflow.py", "swanlab.py")
PARTS = {
    "nemo_rl": ("nemo_rl", "examples", "pyproject.toml"),
    "megatron_bridge": ("src",),
    "megatron_lm": ("megatron",),
}
"""Of each checkout, what is copied to ``FOLDER/src/NAME``."""
IMPORTED = ("src/nemo_rl", "src/megatron_bridge/src", "src/megatron_lm")


def install_packages(folder: Path, python: str) -> None:
    """Unpack the wheels of the list, without what they ask for.

    Args:
        folder: to write.
        python: version of Python that will run them.
    """
    lines = [
        line.split("#")[0].strip() for line in PACKAGES.read_text(encoding="utf-8").splitlines()
    ]
    wanted = [line for line in lines if line]
    source = [line for line in wanted if line.partition("==")[0] in SOURCE_ONLY]
    wheels = [line for line in wanted if line not in source]
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder)]
    binary = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    binary += [part for name in PLATFORMS for part in ("--platform", name)]
    tag = "cp" + python.replace(".", "")
    binary += ["--abi", tag, "--abi", "abi3", "--abi", "none"]
    subprocess.run([*pip, *binary, *wheels], check=True)
    subprocess.run([*pip, *source], check=True)


def add_sources(folder: Path, checkouts: dict[str, Path]) -> None:
    """Copy the sources, the stand-ins and the metadata of NeMo RL and fp8rl.

    Args:
        folder: to write.
        checkouts: the checkout of each of :data:`PARTS`.

    Raises:
        SystemExit: a checkout lacks what is copied of it, or fp8rl is not installed; nothing has
            been written.
    """
    try:
        ours = distribution("fp8rl")
    except PackageNotFoundError:
        raise SystemExit(
            "fp8rl is not installed here; run this with the Python of 'make install'."
        ) from None
    copied = [(name, part) for name, parts in PARTS.items() for part in parts]
    for name, part in copied:
        if not (source := checkouts[name] / part).exists():
            option = name.replace("_", "-")
            raise SystemExit(f"'{source}' does not exist; give a checkout as --{option}.")
    for name, part in copied:
        source, target = checkouts[name] / part, folder / "src" / name / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)
    for name in STAND_INS:
        shutil.copy(ROOT / "tests" / "contract" / "shims" / name, folder / name)
    # Ray makes an environment of its own for TransferQueue by what this requires.
    (queue,) = re.findall(r"^TransferQueue==\S+", PACKAGES.read_text(encoding="utf-8"), re.M)
    write_metadata(folder / "nemo_rl-0.dist-info", "nemo-rl", "0", f"Requires-Dist: {queue}\n")
    info = folder / f"fp8rl-{ours.version}.dist-info"
    write_metadata(info, "fp8rl", ours.version)
    (info / "entry_points.txt").write_text(ours.read_text("entry_points.txt") or "", "utf-8")


def write_metadata(info: Path, name: str, version: str, more: str = "") -> None:
    """Write the metadata of a distribution whose modules lie elsewhere."""
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
    (info / "METADATA").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name in PARTS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="version of Python that will run it")
    options = parser.parse_args()
    folder = options.folder.resolve()
    add_sources(folder, {name: getattr(options, name) for name in PARTS})
    install_packages(folder, options.python)
    places = [ROOT, ROOT / "plugins", folder, *(folder / each for each in IMPORTED)]
    sys.stdout.write(f"PYTHONPATH={':'.join(map(str, places))}:VLLM\n")


if __name__ == "__main__":
    main()

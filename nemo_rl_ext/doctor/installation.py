"""Which NeMo RL is here, and which of fp8rl's patches fit it, by its source alone."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8rl.errors import OptionError, UnsupportedError
from nemo_rl_ext.patch_finder import PATCHES
from nemo_rl_ext.patches.upstream import Upstream, compare_source, served

_VERSION_FILE = "package_info.py"


@dataclass(frozen=True)
class Installation:
    """A NeMo RL, and how our patches fit it."""

    version: str
    fit: str
    """How many patches fit, e.g. ``9 of 9 fit``."""
    problems: tuple[str, ...]
    """One sentence for each patch that does not fit."""


def look_at(package: Path) -> Installation:
    """Compare every patch with the source of a ``nemo_rl`` folder; nothing is imported from it."""
    release, misfits = version(package), compare_patches(package)
    problems = tuple(
        f"Patch '{patch}' does not fit this NeMo RL: {found[0]} {served(release)} "
        f"({len(found)} of its internals differ)."
        for patch, found in misfits.items()
        if found
    )
    return Installation(release, f"{len(misfits) - len(problems)} of {len(misfits)} fit", problems)


def installed_package() -> Path | None:
    """Return the folder of the installed ``nemo_rl``, without importing it."""
    spec = importlib.util.find_spec("nemo_rl")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def find_package(source: Path | None) -> Path:
    """Return the folder of ``nemo_rl`` in a checkout, or of the installed one."""
    if source is not None:
        package = source / "nemo_rl"
        if not (package / _VERSION_FILE).is_file():
            raise OptionError(
                f"--source '{source}' is no checkout of NeMo RL: '{package / _VERSION_FILE}' does "
                "not exist; give the folder that holds 'nemo_rl'."
            )
        return package
    found = installed_package()
    if found is None:
        raise UnsupportedError(
            "NeMo RL is not installed here; run this in the environment of its driver, or give "
            "--source with a checkout of it."
        )
    return found


def version(package: Path) -> str:
    """Return the version that a ``nemo_rl`` folder states, with its commit: ``0.6.0+7ea279a``."""
    file = package / _VERSION_FILE
    if not file.is_file():
        return "of an unknown version"
    values = {
        target.id: node.value.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    numbers = ".".join(str(values.get(part, "?")) for part in ("MAJOR", "MINOR", "PATCH"))
    suffix = values.get("PRE_RELEASE")
    return numbers + (suffix if isinstance(suffix, str) else "") + _commit(package.parent)


def _commit(checkout: Path) -> str:
    """Return ``+`` and the commit of a clone, by which NeMo RL names itself too; else nothing."""
    if not (checkout / ".git").exists():  # git would look in the folders above
        return ""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    try:
        return "+" + subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def relied_on() -> Iterator[tuple[str, Upstream]]:
    """Yield the name of each patch with each internal of NeMo RL that it relies on."""
    for name in sorted({patch for patches in PATCHES.values() for patch in patches}):
        for upstream in importlib.import_module(f"nemo_rl_ext.patches.{name}").UPSTREAM:
            yield name, upstream


def compare_patches(package: Path) -> dict[str, list[str]]:
    """Return for each patch a sentence for each internal that differs in a ``nemo_rl`` folder."""
    misfits: dict[str, list[str]] = {}
    for name, upstream in relied_on():
        found = misfits.setdefault(name, [])
        try:
            compare_source(str(package), upstream)
        except (UnsupportedError, SyntaxError) as error:
            found.append(str(error))
    return misfits

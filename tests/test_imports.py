"""Imports run one way: no module reaches itself through those that it imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "fp8rl": ROOT / "plugins" / "fp8rl",
    "vllm_fp8rl": ROOT / "vllm_fp8rl",
    "megatron_fp8rl": ROOT / "megatron_fp8rl",
    "nemo_rl_ext": ROOT / "nemo_rl_ext",
    "fp8rl_demo": ROOT / "fp8rl_demo",
}


def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file."""
    folder = PACKAGES[package]
    found = {}
    for file in folder.rglob("*.py"):
        parts = [package, *file.relative_to(folder).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str, file: Path, known: set[str]) -> Iterator[str]:
    """Modules of ``known`` that a file imports anywhere, in functions and for types too."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(filter(None, (above, node.module)))
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield from [inner] if inner in known else {base} & known


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_reaches_itself(package: str) -> None:
    files = modules(package)
    graph = {name: set(imported(name, file, set(files))) for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"A circle of imports: {' imports '.join(reversed(error.args[1]))}")

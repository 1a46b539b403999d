"""Imports run one way, and importing a package or its hooks imports no engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support.processes import answer, run_code

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "fp8rl": ROOT / "plugins" / "fp8rl",
    "vllm_fp8rl": ROOT / "vllm_fp8rl",
    "megatron_fp8rl": ROOT / "megatron_fp8rl",
    "torch_fp8rl": ROOT / "torch_fp8rl",
    "nemo_rl_ext": ROOT / "nemo_rl_ext",
    "fp8rl_bench": ROOT / "fp8rl_bench",
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


def imported(name: str, file: Path, known: Set[str]) -> Iterator[str]:
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


def module_graph(package: str) -> dict[str, set[str]]:
    """Module -> the modules of its package that it imports."""
    files = modules(package)
    return {name: set(imported(name, file, set(files))) for name, file in files.items()}


def require_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"A circle of imports: {' imports '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_reaches_itself(package: str) -> None:
    require_no_circle(module_graph(package))


@pytest.mark.parametrize("package", [name for name in PACKAGES if name != "nemo_rl_ext"])
def test_no_folder_reaches_itself(package: str) -> None:
    """A module that is in no folder of the package counts as a folder."""
    graph: dict[str, set[str]] = {}
    for name, others in module_graph(package).items():
        folder, *imports = (".".join(each.split(".")[:2]) for each in (name, *others))
        graph.setdefault(folder, set()).update({*imports} - {folder})
    require_no_circle(graph)


ENGINES = ("vllm", "megatron", "nemo_rl", "ray", "transformers")
MAY_IMPORT = {
    "fp8rl": set(),
    "vllm_fp8rl": {"fp8rl"},
    "megatron_fp8rl": {"fp8rl"},
    "torch_fp8rl": {"fp8rl"},
}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_fp8rl_alone(package: str) -> None:
    """Anywhere, in functions too."""
    found = {
        (name, other)
        for name, file in modules(package).items()
        for other in imported(name, file, every_module())
        if other.split(".")[0] not in MAY_IMPORT[package] | {package}
    }
    assert not found


@cache
def every_module() -> frozenset[str]:
    return frozenset(name for package in PACKAGES for name in modules(package))


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("nemo_rl_ext", ["torch", "pydantic", "fp8rl"]),
        (
            "vllm_fp8rl.hooks, vllm_fp8rl.compat, megatron_fp8rl.hooks, torch_fp8rl.hooks, "
            "torch_fp8rl.conversion, torch_fp8rl.export, nemo_rl_ext.hooks, fp8rl_bench.command, "
            "fp8rl_bench.rollouts, fp8rl_bench.trainer, fp8rl.export, fp8rl.cli.export, fp8rl.cli",
            ENGINES,
        ),
    ],
    ids=["nemo_rl_ext", "all"],
)
def test_importing_imports_no_engine(modules: str, without: list[str]) -> None:
    code = f"import json, sys, {modules}\nprint(json.dumps(sorted(sys.modules)))"
    found = answer(run_code(code, timeout=120))
    assert not [name for name in found for w in without if f"{name}.".startswith(f"{w}.")]

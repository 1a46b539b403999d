"""Where the real sources are: environment variables, and what they are put together to."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {
    "NEMO_RL_SRC": "nemo_rl/algorithms/grpo.py",
    "MEGATRON_BRIDGE_SRC": "src/megatron/bridge/__init__.py",
    "MEGATRON_LM_SRC": "megatron/core/__init__.py",
}
SITE = "NEMO_RL_SITE"
"""A folder of ``pip install --target`` with what NeMo RL imports; see CONTRIBUTING.md."""
AUTOMODEL_SITE = "NEMO_AUTOMODEL_SITE"
"""One with nemo-automodel, which alone in NeMo RL's environment of that worker is to be found."""


def source(variable: str) -> Path:
    """The checkout that a variable names; skips where it is unset."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set; give the path of a checkout")
    path = Path(value)
    assert (path / VARIABLES[variable]).is_file(), f"{variable}={value} is no such checkout"
    return path


def python(variable: str) -> Path:
    """The interpreter that a variable names; skips where it is unset."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set; give an interpreter (CONTRIBUTING.md)")
    path = Path(value)
    assert path.is_file(), f"{variable}={value} is no interpreter"
    return path.absolute()  # not resolved: a virtual environment is found by its link


def automodel() -> str:
    """The folders with nemo-automodel; skips where they are not given."""
    if not os.environ.get(AUTOMODEL_SITE):
        pytest.skip(f"{AUTOMODEL_SITE} is not set; give a folder (CONTRIBUTING.md)")
    return os.environ[AUTOMODEL_SITE]


def environment(*more: str) -> dict[str, str]:
    """Variables of a process that imports NeMo RL from its checkout.

    Args:
        more: further folders of modules.
    """
    folders = [
        str(ROOT / "tests" / "contract" / "shims"),
        str(ROOT / "tests"),
        *([os.environ[SITE]] if os.environ.get(SITE) else []),
        str(source("NEMO_RL_SRC")),
        str(ROOT),
        str(ROOT / "plugins"),
        *more,
    ]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(folders),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def parameters(file: Path, name: str) -> tuple[str, ...] | None:
    """Parameters of a function or ``Class.method``, or () for a class, by reading the source."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    found: ast.AST | None = None
    for part in name.split("."):
        found = next(
            (
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == part
            ),
            None,
        )
        if found is None:
            return None
        body = getattr(found, "body", [])
    if isinstance(found, ast.ClassDef):
        return ()
    assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef)
    given = found.args
    positional = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
    return tuple(a.arg for a in [*positional, *given.kwonlyargs, *filter(None, [given.kwarg])])

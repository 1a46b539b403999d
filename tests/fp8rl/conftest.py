from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a distribution with one ``fp8rl`` entry point into a folder on ``sys.path``."""

    def install(code: str, *, name: str, dist: str | None = None, value: str | None = None) -> Path:
        dist = dist or f"dist_of_{name}"
        folder = tmp_path / dist
        info = folder / f"{dist}-2.5.dist-info"
        info.mkdir(parents=True)
        module = f"module_of_{dist}"
        (folder / f"{module}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[fp8rl]\n{name} = {value or module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)  # another test's
        monkeypatch.syspath_prepend(folder)
        return folder

    return install

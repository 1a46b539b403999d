"""Scripts of examples/ as a newcomer starts them: without arguments."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    str(file.relative_to(ROOT))
    for file in (ROOT / "examples").glob("*.py")
    if "__main__" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_used(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported Megatron once for all of them."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "_SRC" not in k})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"(?s)^usage: .*python {script} "):  # the exit code is 1
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not list(tmp_path.iterdir())

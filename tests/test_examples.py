"""Scripts of examples/ as a newcomer starts them: without arguments, and with wrong ones."""

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
WRONG = {
    "megatron_bridge.py": ["door", "out"],
    "megatron_lm.py": ["--save"],
    "megatron_nemo.py": ["out", "more"],
    "megatron_standalone.py": ["out", "more"],
    "vllm_push.py": ["no-such-folder"],
    "vllm_serve_refit.py": ["no-such-folder"],
    "vllm_trl.py": ["no-such-folder", "new"],
}


@pytest.mark.parametrize("wrong", [False, True], ids=["none", "wrong"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_says_how_it_is_used(
    script: str, wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported Megatron once for all of them."""
    pytest.importorskip("megatron.core")
    monkeypatch.setattr(sys, "argv", [script, *(WRONG[Path(script).name] if wrong else [])])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if "_SRC" not in k})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert isinstance(ended.value.code, str)  # printed, and the exit code is 1
    assert ended.value.code.startswith("usage: ") and f"python {script} " in ended.value.code
    assert not list(tmp_path.iterdir())

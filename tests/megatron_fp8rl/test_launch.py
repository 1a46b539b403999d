"""Processes that are started together: what they print, how they fail, that none stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_fp8rl.testing.launch import LaunchError, launch


def _script(tmp_path: Path, body: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nrank = os.environ['RANK']\n{body}\n")
    return script


def test_launch_returns_what_each_rank_printed(tmp_path):
    script = _script(tmp_path, "print(rank, os.environ['WORLD_SIZE'], sys.argv[1])")
    assert launch(script, 2, ["x"], timeout=30) == ["0 2 x\n", "1 2 x\n"]


def test_launch_tells_why_a_child_died_and_ends_the_others(tmp_path):
    pid = tmp_path / "pid"
    script = _script(
        tmp_path,
        f"if rank == '0':\n    open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)\n"
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "raise ValueError('broken here')",
    )
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 \(1\).*broken here"):
        launch(script, 2, timeout=30)
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_launch_ends_what_does_not_end(tmp_path):
    script = _script(tmp_path, "print('stuck', file=sys.stderr, flush=True); time.sleep(60)")
    with pytest.raises(LaunchError, match=r"did not end within 2 s; its stderr:\nstuck"):
        launch(script, 1, timeout=2)

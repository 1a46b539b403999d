"""Processes that are started together: how they fail, and that none stays."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_fp8rl.testing.launch import LaunchError, launch


def test_launch_tells_why_a_child_died_and_ends_the_others(tmp_path):
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "raise ValueError('broken here')\n"
    )
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 \(1\).*broken here"):
        launch(script, 2, [str(pid)], timeout=30)
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_launch_ends_what_does_not_end(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nprint('stuck', file=sys.stderr, flush=True)\ntime.sleep(60)"
    )
    with pytest.raises(LaunchError, match=r"did not end within 2 s; its stderr:\nstuck"):
        launch(script, 1, timeout=2)

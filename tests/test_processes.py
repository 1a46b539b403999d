"""Scripts in forks of a process that has imported the engines: as in processes of their own."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.processes import run_forked, run_ranks


def script(folder: Path, body: str) -> Path:
    file = folder / "script.py"
    file.write_text(f"import json, os, sys, time\n{body}\n")
    return file


def test_a_fork_is_given_what_a_process_is(tmp_path: Path) -> None:
    """And nothing that the one before it has left behind."""
    (tmp_path / "neighbour.py").write_text("x = 1")
    body = """
import neighbour
sys.stderr.write("told")
print(json.dumps([__name__, sys.argv[1:], os.environ.get("GIVEN"), neighbour.x]))
sys.given = os.environ["LEFT"] = "behind"
assert neighbour.x == sys.modules.setdefault("left", neighbour).x
sys.exit(3)
"""
    for given in ("one", "two"):
        done = run_forked(script(tmp_path, body), "a", 7, timeout=100, GIVEN=given)
        assert json.loads(done.stdout) == ["__main__", ["a", "7"], given, 1]
        assert (done.returncode, done.stderr) == (3, "told")
    body = "print(hasattr(sys, 'given'), 'LEFT' in os.environ, 'left' in sys.modules)"
    assert run_forked(script(tmp_path, body), timeout=100).stdout == "False False False\n"


def test_the_engines_are_there_before_it_begins(tmp_path: Path) -> None:
    """Else each script would import them by itself, and nobody would notice but for the time."""
    body = "print('engines_imported' in sys.modules, 'vllm' in sys.modules)"
    found = run_forked(script(tmp_path, body), timeout=100).stdout
    assert found == f"True {find_spec('vllm') is not None}\n"


def test_what_ends_with_the_process_is_ended(tmp_path: Path) -> None:
    """Engines stop their processes so."""
    body = "import atexit\natexit.register(print, 'ended')\nprint('begun')"
    assert run_forked(script(tmp_path, body), timeout=100).stdout == "begun\nended\n"


def test_what_does_not_end_is_killed(tmp_path: Path) -> None:
    done = run_forked(script(tmp_path, "print('begun', flush=True)\ntime.sleep(60)"), timeout=2)
    assert done.returncode < 0
    assert done.stdout == "begun\n" and done.stderr == "It did not end within 2 s."


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    body = "time.sleep(60 * (os.environ['RANK'] == '0'))\nraise ValueError('broken here')"
    began = time.monotonic()
    with pytest.raises(AssertionError, match="broken here"):
        run_ranks(script(tmp_path, body), 2, timeout=100)
    assert time.monotonic() - began < 50

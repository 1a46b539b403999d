"""Runs of NeMo RL's driver at once: the namespaces, the exit codes, and bad arguments."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.benchmarks import BENCHMARKS, imported

INSIDE = """
import socket, sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from nemo_rl_side_by_side import isolate
isolate(Path({folder!r}))
Path("/tmp/seen").touch()
Path("/dev/shm/seen").touch()
with socket.create_server(("127.0.0.1", {port})) as server:
    socket.create_connection(("127.0.0.1", {port})).close()
    server.accept()[0].close()
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("nemo_rl_side_by_side", monkeypatch)


def test_a_run_has_tmp_shared_memory_and_ports_of_its_own(
    program: ModuleType, tmp_path: Path
) -> None:
    command = [*program.UNSHARE, "true"]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make namespaces")
    before = set(Path("/dev/shm").iterdir())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = INSIDE.format(
            benchmarks=str(BENCHMARKS), folder=str(tmp_path), port=taken.getsockname()[1]
        )
        subprocess.run([*program.UNSHARE, sys.executable, "-c", code], check=True)
    assert [file.name for file in tmp_path.iterdir()] == ["seen"]
    assert Path("/dev/shm/seen") not in {*Path("/dev/shm").iterdir()} - before
    assert not Path("/tmp/seen").exists()


def test_runs_that_fail_are_counted(
    program: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv[1:])\nsys.exit('fp8rl:2' in sys.argv)\n")
    monkeypatch.setattr(program, "HERE", script)
    monkeypatch.setattr(program, "UNSHARE", ())
    options = argparse.Namespace(
        folder=tmp_path / "out", runs=["bf16:1", "fp8rl:2"], apart=0.0, arguments=["--limit", "5"]
    )
    assert program.run_all(options) == 1
    told = capsys.readouterr().err
    assert "bf16:1 ended with 0" in told
    assert "fp8rl:2 ended with 1" in told
    for name in options.runs:
        log = (tmp_path / "out" / f"{name.replace(':', '-')}.log").read_text()
        folder = os.fspath((tmp_path / "out").resolve())
        assert log.strip() == str(
            ["--inside", "--runs", name, "--folder", folder, "--", "--limit", "5"]
        )


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        ("bf16", "--runs has 'bf16'; give VARIANT:SEED, such as fp8rl:1"),
        ("bf16:1,fp8rl:x", "--runs has 'fp8rl:x'"),
        ("bf16:1,bf16:1", "--runs has a run twice"),
    ],
)
def test_runs_without_a_seed_or_twice_are_refused(
    runs: str,
    told: str,
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--folder", "out", "--runs", runs])
    with pytest.raises(SystemExit):
        program.parse()
    assert told in capsys.readouterr().err

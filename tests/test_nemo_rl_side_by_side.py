"""Runs of NeMo RL's driver at once: the namespaces, the exit codes, and bad arguments."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from support.benchmarks import BENCHMARKS, imported

INSIDE = """
import socket, sys
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
from nemo_rl_side_by_side import isolate
isolate(Path({folder!r}))
Path("/tmp", {name!r}).touch()
Path("/dev/shm", {name!r}).touch()
with socket.create_server(("127.0.0.1", {port})) as server:
    socket.create_connection(("127.0.0.1", {port})).close()
    server.accept()[0].close()
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("nemo_rl_side_by_side", monkeypatch)


def require_namespaces(program: ModuleType) -> None:
    """Skip the test where this user cannot make them."""
    unshare = shutil.which("unshare")
    made = unshare and subprocess.run([*program.UNSHARE, "true"], capture_output=True, check=False)
    if not made or made.returncode:
        pytest.skip("this user cannot make namespaces")


def test_a_run_has_tmp_shared_memory_and_ports_of_its_own(
    program: ModuleType, tmp_path: Path
) -> None:
    require_namespaces(program)
    name = f"fp8rl-{uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code = INSIDE.format(
            benchmarks=str(BENCHMARKS),
            folder=str(tmp_path),
            name=name,
            port=taken.getsockname()[1],
        )
        subprocess.run([*program.UNSHARE, sys.executable, "-c", code], check=True)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert not Path("/dev/shm", name).exists()
    assert not Path("/tmp", name).exists()


def test_a_run_gets_its_ray_and_its_arguments(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The namespaces and Ray itself are left out here."""
    driver = tmp_path / "nemo_rl.py"
    driver.write_text(
        "import json, os, sys\n"
        "names = ('RAY_ADDRESS', 'NRL_MEGATRON_CHECKPOINT_DIR')\n"
        "print(json.dumps([sys.argv[1:], [os.environ[name] for name in names]]))\n"
        "sys.exit(7)\n"
    )
    asked = []
    for name in ("RAY_ADDRESS", "NRL_MEGATRON_CHECKPOINT_DIR", "RAY_prestart_worker_first_driver"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(program, "HERE", tmp_path / "side_by_side.py")
    monkeypatch.setattr(program, "isolate", asked.append)
    real = subprocess.run

    def run(command: list[str], **keywords: Any) -> Any:
        if "start" not in command:
            return real(command, **keywords)
        return asked.append([part for part in command if part.startswith("--num-gpus")])

    monkeypatch.setattr(program.subprocess, "run", run)
    argv = ["program", "--folder", "OUT", "--runs", "fp8rl:3", "--inside", "--", "--gpus=2"]
    monkeypatch.setattr(sys, "argv", argv)
    options = program.parse()
    options.folder = tmp_path
    assert program.run_inside(options) == 7
    assert asked == [tmp_path / "fp8rl-3" / "tmp", ["--num-gpus=2"]]
    here = str(tmp_path / "fp8rl-3")
    arguments, environment = json.loads((tmp_path / "fp8rl-3.json").read_text())
    assert arguments == ["--gpus=2", "--folder", here, "--variants", "fp8rl", "--seed", "3"]
    assert environment == ["127.0.0.1:6379", f"{here}/converted"]


def test_runs_end_with_the_program(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_namespaces(program)
    held, script = tmp_path / "held", tmp_path / "script.py"
    os.mkfifo(held)
    # The run holds the writing end of the pipe for as long as it lives.
    script.write_text(f"import time\npipe = open({str(held)!r}, 'wb')\ntime.sleep(600)\n")
    monkeypatch.setattr(program, "HERE", script)
    reading = []

    def interrupt(seconds: float) -> None:
        reading.append(held.open("rb"))  # when the run has opened it
        raise KeyboardInterrupt

    monkeypatch.setattr(program.time, "sleep", interrupt)
    options = argparse.Namespace(folder=tmp_path / "out", runs=["bf16:1"], apart=0.0, arguments=[])
    with pytest.raises(KeyboardInterrupt):
        program.run_all(options)
    ended, _, _ = select.select(reading, [], [], 60)
    assert ended and ended[0].read() == b""
    reading[0].close()


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
        ("bf16:1", "--folder /tmp/out is in /tmp, of which each run has its own"),
    ],
)
def test_what_cannot_be_run_is_refused(
    runs: str,
    told: str,
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--folder", "/tmp/out", "--runs", runs])
    with pytest.raises(SystemExit):
        program.parse()
    assert told in capsys.readouterr().err

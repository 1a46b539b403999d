"""``benchmarks/nemo_rl_environment.py``: what it lays into the folder, without the wheels."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from support.benchmarks import imported
from support.processes import run_code


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("nemo_rl_environment", monkeypatch)


def checkouts(program: ModuleType, folder: Path) -> dict[str, Path]:
    for name, parts in program.PARTS.items():
        for part in parts:
            place = folder / name / part
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix:
                place.write_text("", encoding="utf-8")
            else:
                place.mkdir()
                (place / "kept.py").write_text("", encoding="utf-8")
    return {name: folder / name for name in program.PARTS}


def test_stand_ins_and_metadata_are_found(program: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    program.add_sources(out, checkouts(program, tmp_path / "from"))
    for part in program.IMPORTED:
        assert (out / part).is_dir()
    assert (out / "src" / "nemo_rl" / "nemo_rl" / "kept.py").is_file()
    code = """
import importlib.metadata as metadata, wandb, mlflow, swanlab
assert wandb.wandb_run.Run and mlflow.anything() is not None
print(metadata.requires("nemo-rl"))
names = {e.name for e in metadata.distribution("fp8rl").entry_points if e.group == "fp8rl"}
print(sorted(names))
"""
    found = run_code(code, folders=(out,))
    assert "['TransferQueue==" in found.stdout and "'nemo_rl', 'vllm'" in found.stdout, found


def test_a_folder_that_is_no_checkout_is_refused(program: ModuleType, tmp_path: Path) -> None:
    places = checkouts(program, tmp_path / "from")
    places["megatron_lm"] = tmp_path
    with pytest.raises(SystemExit, match="give a checkout as --megatron-lm"):
        program.add_sources(tmp_path / "out", places)
    assert not (tmp_path / "out").exists()


def test_wheels_are_those_of_the_other_python(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Linux and that Python alone, and the package that has no wheel apart."""
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    program.install_packages(tmp_path, "3.12")
    wheels, source = calls
    assert "cp312" in wheels and "manylinux_2_28_x86_64" in wheels
    assert any(each.startswith("ray==") for each in wheels)
    assert source[-1].startswith("antlr4-python3-runtime==") and source[-1] not in wheels

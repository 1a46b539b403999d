from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.errors import CheckpointError
from fp8rl_demo import checkpoint

IDENTITY = {"precision": "fp8", "settings": {"seed": 0, "model": {"num_layers": 2}}}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def _save(folder: Path, step: int, model_folder: Path, trainer: dict | None = None) -> Path:
    weights = {"w": torch.full((2, 3), float(step), dtype=torch.bfloat16)}
    return checkpoint.save(folder, step, weights, trainer or {}, IDENTITY, model_folder)


def test_trainer_state_comes_back_with_its_types_and_bits(tmp_path: Path, model_folder: Path):
    shared = torch.randn(4)
    trainer = {
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": shared}, 1: {"exp_avg": shared}},
            "param_groups": [{"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "params": [0, 1], "x": None}],
        }
    }
    path = _save(tmp_path / "run", 5, model_folder, trainer)
    loaded = checkpoint.load(path, IDENTITY)
    assert loaded.step == 5
    assert torch.equal(loaded.model["w"], torch.full((2, 3), 5.0, dtype=torch.bfloat16))
    assert loaded.trainer["optimizer"]["param_groups"] == trainer["optimizer"]["param_groups"]
    state = loaded.trainer["optimizer"]["state"]
    assert list(state) == [0, 1]
    assert torch.equal(state[0]["step"], torch.tensor(3.0))
    assert torch.equal(state[1]["exp_avg"], shared)
    assert (path / "config.json").is_file()


def test_only_the_newest_two_are_kept(tmp_path: Path, model_folder: Path):
    for step in (1, 2, 3):
        _save(tmp_path / "run", step, model_folder)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["step-000002", "step-000003"]
    (tmp_path / "run" / "step-backup").mkdir()
    (tmp_path / "run" / "step-000009").touch()
    assert checkpoint.latest(tmp_path / "run") == tmp_path / "run" / "step-000003"
    assert checkpoint.latest(tmp_path) is None


def in_child(act: Callable[[], object]) -> tuple[int, str]:
    """Run in a fork of this process; return its exit code and what a CheckpointError says."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            act()
        except CheckpointError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read) as stream:
        told = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told


def test_a_kill_while_writing_leaves_the_older_checkpoint(tmp_path: Path, model_folder: Path):
    run, write = tmp_path / "run", torch.save
    _save(run, 1, model_folder)

    def write_then_die(*args: Any, **options: Any) -> None:
        write(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    def act() -> None:
        torch.save = write_then_die
        _save(run, 2, model_folder)

    assert in_child(act) == (-signal.SIGKILL, "")
    assert (run / ".partial-step-000002" / "trainer" / "state.pt").is_file()
    found = checkpoint.latest(run)
    assert found is not None and found.name == "step-000001"
    assert checkpoint.load(found, IDENTITY).step == 1
    assert _save(run, 2, model_folder).name == "step-000002"  # the leftover is no obstacle
    assert not (run / ".partial-step-000002").exists()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "trainer/state.pt", "state.json", "SHA256SUMS"]
)
def test_any_damage_to_any_file_is_an_error(tmp_path: Path, model_folder: Path, name: str):
    """A length or a bit anywhere: a run goes on bit for bit, or not at all."""
    trainer = {"optimizer": {"step": 3, "lr": 0.25, "exp_avg": torch.ones(4)}}
    path = _save(tmp_path / "run", 1, model_folder, trainer)
    file = path / name
    whole = file.read_bytes()
    places = range(0, len(whole), len(whole) // 50 + 1)
    damages = [whole[:n] for n in places] + [whole + b" ", b"[]", b"{}", b"[" * 5000, b"\xff\xfe"]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        damages.append(bytes(flipped))
    for body in damages:
        file.write_bytes(body)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path, IDENTITY)
        told = str(caught.value)
        assert f"Checkpoint {path} is damaged (" in told or " has format " in told, body
        assert "\n" not in told
    file.unlink()
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged .* delete that folder"):
        checkpoint.load(path)


@pytest.mark.parametrize("full", ["model", "trainer"])
def test_a_full_disk_is_told_and_gets_its_room_back(tmp_path: Path, model_folder: Path, full: str):
    """A limit on a file's size stands in for the disk's."""
    run = tmp_path / "run"
    path = _save(run, 1, model_folder)

    def act() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        sizes = {"model": 4, "trainer": 4, full: 1 << 16}
        model, trainer = ({"w": torch.ones(n)} for n in sizes.values())
        checkpoint.save(run, 2, model, trainer, {}, model_folder)

    _, told = in_child(act)
    assert f"Checkpoint {run / 'step-000002'} cannot be written (" in told
    assert "; free space on its disk, or give --settings '{\"checkpoint_every\": 0}'" in told
    assert [*run.iterdir()] == [path]


def test_what_cannot_be_resumed_or_stored_is_refused(tmp_path: Path, model_folder: Path):
    path = _save(tmp_path / "run", 1, model_folder)
    other = {"precision": "bf16", "settings": {"seed": 0, "model": {"num_layers": 3}}}
    with pytest.raises(CheckpointError, match=r"\(precision, settings.model.num_layers differ\)"):
        checkpoint.load(path, other)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "format": 0}))
    with pytest.raises(CheckpointError, match="has format 0, this release reads 3; start a new"):
        checkpoint.load(path)
    with pytest.raises(CheckpointError, match="Cannot store this trainer state"):
        _save(tmp_path / "other", 1, model_folder, {"rng": [object()]})
    assert [*(tmp_path / "other").iterdir()] == []

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import CheckpointError
from fp8rl_demo import checkpoint, loop
from fp8rl_demo.events import EventWriter
from fp8rl_demo.settings import Settings
from support.tiny import add_chat_tokenizer


def _run(folder: Path, snapshot: Path, name: str = "a-hub/model") -> loop.GrpoRun:
    add_chat_tokenizer(snapshot)
    (snapshot / "config.json").write_text("{}")
    settings = Settings(pretrained=str(snapshot), pretrained_name=name)
    return loop.GrpoRun("fp8", Recipe(), settings, 9, folder, EventWriter(None))


def test_a_run_goes_on_with_another_snapshot_of_its_model(tmp_path: Path) -> None:
    first, second = (_run(tmp_path, tmp_path / each) for each in ("12fd25f", "9a8b7c6"))
    saved = checkpoint.save(tmp_path, 1, {}, {}, first.identity, tmp_path / "12fd25f")
    assert checkpoint.load(saved, second.identity).step == 1
    other = _run(tmp_path, tmp_path / "12fd25f", "a-hub/other")
    with pytest.raises(CheckpointError, match=r"settings\.pretrained_name differ"):
        checkpoint.load(saved, other.identity)


def test_the_state_of_a_resumed_run_is_gone_before_the_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is as large as the optimizer's, in memory that the engine's start needs too."""
    run = _run(tmp_path, tmp_path / "snapshot")
    weights = {"w": torch.ones(4)}
    trainer = {"optimizer": {"m": torch.ones(4)}, "observer": {}}
    checkpoint.save(tmp_path, 3, weights, trainer, run.identity, tmp_path / "snapshot")
    alive: list[weakref.ref] = []

    def load(*tensors: Any) -> None:
        alive.extend(weakref.ref(t) for each in tensors for t in each.values())

    class Started(Exception): ...

    def start(*args: Any, **kwargs: Any) -> None:
        assert len(alive) == 2 and not any(tensor() is not None for tensor in alive)
        raise Started

    policy = SimpleNamespace(
        load=load,
        load_optimizer_state=load,
        observer=SimpleNamespace(load_state_dict=lambda state: None),
    )
    monkeypatch.setattr(loop, "MegatronPolicy", lambda *args: policy)
    monkeypatch.setattr(loop, "VllmRollout", start)
    with pytest.raises(Started):
        run.run(4, None, resume=True)

from __future__ import annotations

from pathlib import Path

import pytest

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

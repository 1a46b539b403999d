from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from fp8rl.errors import ModelError, OptionError
from fp8rl_demo import command
from fp8rl_demo.settings import task_of
from fp8rl_demo.supervisor import DemoError, Supervisor
from support.tiny import add_chat_tokenizer


def _model(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    add_chat_tokenizer(folder)
    return str(folder)


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _model(tmp_path / "12fd25f")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: snapshot)
    found = command._settings(None, 0, "a-hub/model", "sums")
    assert (found.pretrained, found.pretrained_name) == (snapshot, "a-hub/model")
    monkeypatch.chdir(tmp_path)
    found = command._settings(None, 0, "12fd25f", "sums")
    assert (found.pretrained, found.pretrained_name) == (snapshot, snapshot)


def test_models_that_the_demo_cannot_train_are_refused(tmp_path: Path) -> None:
    """Its tokenizer has a token for each character, and an answer has 128 tokens."""
    longest = len("[user]What is 99 + 9? Answer with the number alone.>") + 128
    model = _model(tmp_path / "enough", max_position_embeddings=longest)
    settings = command._settings(None, 0, model, "sums")
    assert command._length(settings, task_of(settings)) == longest
    model = _model(tmp_path / "too few", max_position_embeddings=longest - 1)
    settings = command._settings(None, 0, model, "sums")
    with pytest.raises(OptionError, match=rf"'sums' and its answer take up to {longest} tokens"):
        command._length(settings, task_of(settings))
    (tmp_path / "too few" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"cannot be loaded .* give a model with a tokenizer"):
        command._length(settings, task_of(settings))
    model = _model(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    with pytest.raises(ModelError, match="quantized already"):
        command._settings(None, 0, model, "sums")


def test_a_stage_that_fails_leaves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Supervisor, stages: list) -> None:
        if any(stage.title != "warm start" for stage in stages):
            raise DemoError("fp8: the disk is full")

    monkeypatch.setattr(Supervisor, "run", fail)
    with pytest.raises(DemoError, match="the disk is full"):
        command.demo(out=tmp_path / "out")
    assert (tmp_path / "out" / "report.html").is_file()

"""Where a model's folder is found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.errors import ModelError
from fp8rl.models.folder import end_tokens, local_folder, read_tensors, require_plain_weights
from support.model_folders import model


def test_a_folder_is_itself_and_a_name_of_the_hub_the_folder_of_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--model" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (cached / "config.json").write_text("{}", encoding="utf-8")
    (refs := tmp_path / "models--some--model" / "refs").mkdir()
    (refs / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert local_folder(str(cached)) == cached
    assert local_folder("some/model") == cached
    for name in ("some/other", "./no"):
        with pytest.raises(ModelError, match=f"'{name}' is no folder.*give the folder"):
            local_folder(name)


def test_quantized_weights_are_refused() -> None:
    key = "quantization_config"
    plain: dict[str, Any] = {"model_type": "qwen3", key: None, "text_config": None}
    require_plain_weights(plain, "some/model")
    for quantized in ({key: {"quant_method": "fp8"}}, {"text_config": {key: {"bits": 8}}}):
        with pytest.raises(ModelError, match=f"'some/model' is quantized already .'{key}'.*BF16"):
            require_plain_weights(plain | quantized, "some/model")


def test_a_model_without_access_names_the_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client raises some refusals as they are, others as the cause of an error."""

    def refuse(*args: Any, **options: Any) -> None:
        error = OSError("403 Client Error.")
        error.response = SimpleNamespace(status_code=403)  # type: ignore[attr-defined]
        raise LookupError("cannot find the files") from error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=r"'some/gated' is no folder.*'hf auth login'"):
        local_folder("some/gated")


TENSORS = {name: torch.full((2, 2), float(i)).bfloat16() for i, name in enumerate("abc")}
SCALE = "model.layers.0.self_attn.k_scale"


def test_tensors_are_of_the_files_of_the_index_and_without_kv_scales(tmp_path: Path) -> None:
    """Mistral's repositories hold the weights once more, under other names."""
    folder = model(tmp_path / "in", {**TENSORS, SCALE: torch.ones(1)}, files=2)
    save_file({"tok_embeddings.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    found = dict(read_tensors(folder))
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_all_ends_that_a_model_names_end_an_answer(tmp_path: Path) -> None:
    assert end_tokens(tmp_path, None) == []
    for name, ends in {"config": 2, "generation_config": [3, 2]}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": ends}))
    assert end_tokens(tmp_path, 7) == [2, 3, 7]
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json.*download the model again"):
        end_tokens(tmp_path, 7)

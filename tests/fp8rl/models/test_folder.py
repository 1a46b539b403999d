"""Where a model's folder is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl.errors import ModelError
from fp8rl.models.folder import local_folder, require_plain_weights


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


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantized_weights_are_refused(key: str) -> None:
    plain: dict[str, Any] = {"model_type": "qwen3", key: None, "text_config": None}
    require_plain_weights(plain, "some/model")
    for quantized in ({key: {"quant_method": "fp8"}}, {"text_config": {key: {"bits": 8}}}):
        with pytest.raises(ModelError, match=f"'some/model' is quantized already .'{key}'.*BF16"):
            require_plain_weights(plain | quantized, "some/model")

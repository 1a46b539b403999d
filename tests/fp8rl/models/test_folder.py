"""Where a model's folder is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8rl.errors import ModelError
from fp8rl.models.folder import local_folder


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

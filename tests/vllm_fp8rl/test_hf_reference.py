"""The reference itself; there is no engine here."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MiniMaxM2Config, PreTrainedConfig

from fp8rl import Recipe
from fp8rl.export import plan_export, write_export
from fp8rl.recipe import KVCache
from vllm_fp8rl.testing.hf_reference import load_exported, load_reference
from vllm_fp8rl.testing.tiny import make_family_checkpoint

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))


def test_minimax_is_rotated_as_published_configs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ``rotary_dim``, which transformers before 5.18 read past: it rotated whole heads."""
    path = make_family_checkpoint(tmp_path / "model", 0, "minimax_m2")
    plan = plan_export(path, RECIPE)
    write_export(plan, tmp_path / "out")
    theirs = PreTrainedConfig.convert_rope_params_to_dict  # what MiniMax's inherited then
    monkeypatch.setattr(MiniMaxM2Config, "convert_rope_params_to_dict", theirs)
    config = MiniMaxM2Config.from_pretrained(path)
    assert (config.rotary_dim, config.head_dim) == (64, 128)
    assert "partial_rotary_factor" not in config.rope_parameters
    for loaded in (load_reference(path, RECIPE), load_exported(tmp_path / "out", RECIPE)):
        frequencies = loaded.model.model.rotary_emb.inv_freq
        assert 2 * len(frequencies) == config.rotary_dim

"""The reference itself, and what tests on a GPU can tell by it; there is no engine here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MiniMaxM2Config, PreTrainedConfig

from fp8rl import Recipe
from fp8rl.export import plan_export, write_export
from fp8rl.recipe import KVCache
from support.engine import load_tensors
from support.hf_reference import load_exported, load_reference
from support.tiny import make_family_checkpoint
from support.wrong_tensors import changed_checkpoint, nearer, wrong_tensors

RECIPE = Recipe(kv_cache=KVCache(dtype="auto"))
_generator = torch.Generator().manual_seed(3)
TOKENS = torch.randint(2, 512, (48, 24), generator=_generator)


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


@pytest.mark.slow
def test_a_wrong_tensor_is_told_from_bf16_rounding(tmp_path: Path) -> None:
    """As in ``tests/gpu/test_vllm_families.py``; transformers in BF16 stands in for the engine."""

    def logprobs(path: Path, **options) -> torch.Tensor:
        return load_reference(path, RECIPE, **options).teacher_forced_logprobs(TOKENS).flatten()

    def engine(path: Path) -> torch.Tensor:
        return logprobs(path, dtype=torch.bfloat16, attention="sdpa")

    earlier, path = (
        make_family_checkpoint(tmp_path / name, seed, "minimax_m2", initializer_range=0.04)
        for seed, name in enumerate("ab")
    )
    changes = wrong_tensors(load_tensors(path), load_tensors(earlier))
    assert len(changes) == 15
    expected, wrong, said = logprobs(path), {}, {}
    for what, tensors in changes.items():
        changed = changed_checkpoint(path, tmp_path / "wrong", tensors)
        wrong[what], said[what] = logprobs(changed), engine(changed)
    assert not nearer(engine(path), expected, wrong)
    assert all(what in nearer(actual, expected, wrong) for what, actual in said.items())

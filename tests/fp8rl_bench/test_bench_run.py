"""The whole command on a CPU: both engines, on a small model with a tokenizer and on a shape."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.processes import run_code
from support.tiny import make_checkpoint


def bench(folder: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run the command in a process and return its JSON."""
    done = run_code("-m", "fp8rl", "bench", folder, "--out", out, "--json", *options, timeout=900)
    assert not done.returncode, done.stderr[-4000:]
    assert "BF16: starts an engine" in done.stderr and (out / "report.html").is_file()
    report = json.loads(done.stdout)
    assert report == json.loads((out / "report.json").read_text(encoding="utf-8"))
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("vllm")
    pytest.importorskip("megatron.core")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Most of the time goes into BF16 products of the layer that is timed, backward.
    narrow = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", seed=0, **narrow)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w9"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(folder)
    return folder


@pytest.mark.timeout(1000)
def test_a_trained_model_has_speeds_memory_and_kl(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    longest = "x" * 200_000  # of one word, and more than an argument of a process may have
    prompts.write_text(f"w20 w30 w40 w50\n\nw60 w70\n{longest}\n", encoding="utf-8")
    names = ["bf16", "fp8rl-kv", "fp8rl-exact"]
    options = ("--variants", ",".join(names), "--load", "2x8x4", "--minutes", "60")
    options += ("--prompts", str(prompts))
    report = bench(model, tmp_path / "out", *options)
    rows, training = report["variants"], report["training"]
    assert list(rows) == names and training["failed"] == {}
    for name, row in rows.items():
        assert row["failed"] == {}
        assert row["tokens_per_second"] and row["start_seconds"] > 0 and row["cache_tokens"] > 0
        assert 0 < row["engines"]["tokens"] <= 3 * 16
        assert math.isfinite(row["engines"]["kl_k3"])
        assert ("refit_seconds" in row) == (name != "bf16")
    # Keys and values in one byte, and matrices of which a scale is a 16,384th.
    bf16, fp8 = rows["bf16"], rows["fp8rl-kv"]
    assert fp8["cache_bytes_per_token"] == bf16["cache_bytes_per_token"] == 2 * 2 * 2 * 2 * 128
    assert fp8["weight_bytes"] < bf16["weight_bytes"]
    trainer = training["trainer"]
    assert set(trainer) == set(training["bf16_trainer"]) == set(names)
    assert trainer["fp8rl-exact"]["equal"] == 1.0 and trainer["bf16"]["kl_k3"] < 0.01
    # Both score the same answers; one that does not follow the recipe is no nearer to them.
    assert 0 < trainer["fp8rl-kv"]["kl_k3"] < training["bf16_trainer"]["fp8rl-kv"]["kl_k3"]
    for part in ("linears", "layer", "forward"):
        assert all(ms > 0 for ms in training[part].values())
    assert set(training["layer"]) == {"BF16", "fp8rl", "fp8rl, FP8 K and V", "fp8rl, exact"}
    assert report["device"] == "CPU" and "CPU: FP8 is emulated" in report["advice"]


@pytest.mark.timeout(600)
def test_a_shape_needs_a_config_alone(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shape"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    report = bench(folder, tmp_path / "out", "--random", "--variants", "bf16")
    rows, training = report["variants"], report["training"]
    assert rows["bf16"]["failed"] == training["failed"] == {} and report["load"] == "4x16x8"
    assert "engines" not in rows["bf16"] and "trainer" not in training
    assert "Random weights" in report["advice"]

"""Micro-batches that leave the GPU waiting: which keys count, and when the doctor speaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8rl import PluginManager
from fp8rl.estimate import Model, find_gpu, smallest_micro_batch
from fp8rl.families import module_names
from fp8rl.recipe import Pins
from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.doctor.micro_batch import small_micro_batches

SHAPES = Path(__file__).resolve().parents[3] / "benchmarks" / "shapes"
LENGTH = 2048


def shape(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))


def told(policy: dict[str, Any], model: dict[str, Any], **megatron: Any) -> list[str]:
    value = {
        "max_total_sequence_length": LENGTH,
        "train_micro_batch_size": 16,
        "logprob_batch_size": 16,
        "megatron_cfg": {"enabled": True, **megatron},
        **policy,
    }
    rows = PluginManager().pin_policy(Pins(), module_names(model)).report()
    return list(small_micro_batches(Sections({"policy": value}, DRIVERS["grpo"]), model, rows))


def least(model: dict[str, Any], *, training: bool, tp: int = 1) -> int:
    rows = PluginManager().pin_policy(Pins(), module_names(model)).report()
    return smallest_micro_batch(
        find_gpu("h100"), Model(model, rows, tp), LENGTH, True, training=training
    )


def test_large_micro_batches_are_no_topic() -> None:
    assert not told({}, shape("qwen3_8b"))


def test_each_phase_is_told_with_its_keys() -> None:
    model = shape("qwen3_4b")
    training, logprobs = least(model, training=True), least(model, training=False)
    assert min(training, logprobs) > LENGTH and max(training, logprobs) < 16 * LENGTH
    (line,) = told({"train_micro_batch_size": 1}, model)
    assert line.startswith(
        "A micro-batch of training has at most 2,048 tokens (policy.train_micro_batch_size x "
        f"policy.max_total_sequence_length). On a host like the one that was measured the GPU "
        f"waits for launches below about {training:,} "
    )
    (line,) = told({"logprob_batch_size": 1}, model)
    assert "of log-probabilities" in line and f"about {logprobs:,} " in line


@pytest.mark.parametrize("section", ["sequence_packing", "dynamic_batching"])
def test_tokens_of_packed_micro_batches_count(section: str) -> None:
    model = shape("qwen3_4b")
    tokens = {"enabled": True, "train_mb_tokens": 4096, "logprob_mb_tokens": 65536}
    (line,) = told({section: tokens, "train_micro_batch_size": 64}, model)
    assert f"4,096 tokens (policy.{section}.train_mb_tokens)" in line
    assert not told({section: {**tokens, "train_mb_tokens": 65536}}, model)


def test_a_rank_has_a_part_of_the_layer_or_of_the_tokens() -> None:
    model = shape("qwen3_8b")
    whole = least(model, training=True)
    split = least(model, training=True, tp=2)
    assert whole < split
    size = {"train_micro_batch_size": -(-whole // LENGTH)}
    assert not told(size, model)
    (line,) = told(size, model, tensor_model_parallel_size=2)
    assert f"about {split:,} " in line
    (line,) = told(size, model, context_parallel_size=2)
    assert f"about {2 * whole:,} " in line


@pytest.mark.parametrize(
    "policy",
    [
        {"train_micro_batch_size": None, "logprob_batch_size": "4"},
        {"max_total_sequence_length": None},
        {"sequence_packing": {"enabled": True}},
    ],
)
def test_keys_that_are_missing_or_text_are_left_to_nemo_rl(policy: dict[str, Any]) -> None:
    assert not told(policy, shape("qwen3_4b"))


def test_a_model_that_was_not_measured_is_no_topic() -> None:
    small = {"train_micro_batch_size": 1, "logprob_batch_size": 1}
    assert told(small, shape("qwen3_4b"))
    assert not told(small, shape("moonlight_16b_a3b"))

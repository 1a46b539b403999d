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
ONE_SEQUENCE = {"train_micro_batch_size": 1, "logprob_batch_size": 1}
GIVES_ROOM = {"logprob_chunk_size": 256}


def shape(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))


def told(
    policy: dict[str, Any], model: dict[str, Any], driver: str = "grpo", **megatron: Any
) -> list[str]:
    value = {
        "max_total_sequence_length": LENGTH,
        "train_global_batch_size": 512,
        "train_micro_batch_size": 16,
        "logprob_batch_size": 16,
        "megatron_cfg": {"enabled": True, **megatron},
        **policy,
    }
    rows = PluginManager().pin_policy(Pins(), module_names(model)).report()
    config = {"policy": value, "cluster": {"num_nodes": 1, "gpus_per_node": 8}}
    return list(small_micro_batches(Sections(config, DRIVERS[driver]), model, rows))


def least(model: dict[str, Any], *, training: bool, tp: int = 1) -> int:
    rows = PluginManager().pin_policy(Pins(), module_names(model)).report()
    return smallest_micro_batch(find_gpu("h100"), Model(model, rows, tp), LENGTH, training=training)


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


def test_keys_that_make_room_are_named_where_they_are_not_set() -> None:
    model, small = shape("qwen3_4b"), {"train_micro_batch_size": 1}
    (line,) = told(small, model)
    assert "policy.logprob_chunk_size" in line
    (line,) = told({**small, **GIVES_ROOM}, model, defer_fp32_logits=True)
    assert "policy.logprob_chunk_size" not in line and "Make it larger (docs/" in line


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


def test_a_rank_with_no_more_sequences_is_told_nothing() -> None:
    model = shape("qwen3_4b")
    assert len(told(ONE_SEQUENCE, model)) == 2
    assert not told({**ONE_SEQUENCE, "train_global_batch_size": 8}, model)  # one for each GPU
    assert told({**ONE_SEQUENCE, "train_global_batch_size": 8}, model, tensor_model_parallel_size=2)


@pytest.mark.parametrize(
    "policy",
    [
        {"train_micro_batch_size": None, "logprob_batch_size": "4"},
        {**ONE_SEQUENCE, "max_total_sequence_length": None},
        {"sequence_packing": {"enabled": True}},
    ],
)
def test_keys_that_are_missing_or_text_are_left_to_nemo_rl(policy: dict[str, Any]) -> None:
    assert not told(policy, shape("qwen3_4b"))


def test_layers_that_were_not_measured_are_no_topic() -> None:
    """Multi-latent attention."""
    assert told(ONE_SEQUENCE, shape("qwen3_4b"))
    assert not told(ONE_SEQUENCE, shape("moonlight_16b_a3b"))


def test_layers_with_experts() -> None:
    """Each GPU has tokens of others' too, but no more of them: the experts are shared."""
    model = shape("qwen3_30b_a3b")
    rows = PluginManager().pin_policy(Pins(), module_names(model)).report()
    shared = {"expert_model_parallel_size": 8}
    fewest = [
        smallest_micro_batch(find_gpu("h100"), Model(model, rows, ep=8), LENGTH, training=training)
        for training in (False, True)
    ]
    assert all(2 * LENGTH < count < 8 * LENGTH for count in fewest)
    lines = told({"train_micro_batch_size": 2, "logprob_batch_size": 2}, model, **shared)
    for line, count in zip(lines, fewest, strict=True):
        assert f"the GPU waits longer than it works below about {count:,} (H100" in line
    assert not told({"train_micro_batch_size": 8, "logprob_batch_size": 8}, model, **shared)
    assert not told(ONE_SEQUENCE, model, expert_model_parallel_size=5)  # refused elsewhere


@pytest.mark.parametrize("driver", DRIVERS)
def test_drivers_that_have_other_micro_batches_are_no_topic(driver: str) -> None:
    """DPO counts half of its sequences; a student computes no log-probabilities."""
    speaks = bool(told(ONE_SEQUENCE, shape("qwen3_4b"), driver))
    assert speaks is (driver in ("grpo", "single_controller", "ppo"))

"""The KV cache that the doctor advises, against measured memory and numbers worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fp8rl import PluginManager
from fp8rl.models.sizes import GIB
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins
from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.doctor.wake_up import CACHE_KEY, wake_up_section
from support.nemo_rl import put
from support.sources import ROOT

SHAPE = json.loads((ROOT / "benchmarks" / "shapes" / "qwen3_8b.json").read_text(encoding="utf-8"))
PARAMETERS = 8_190_735_360
"""Of Qwen3-8B, as its page on Hugging Face says."""
WEIGHTS = 8.83
"""GiB of Qwen3-8B in FP8: "Model loading took" in the log of vLLM 0.25.1."""
OPTIMIZER = "policy.megatron_cfg.optimizer"
AWARE = {f"{OPTIMIZER}.use_precision_aware_optimizer": True}
APART = {"enabled": False, "resources": {"num_nodes": 1, "gpus_per_node": 4}}


def told(
    overrides: dict[str, Any], gpus: int = 8, memory: float | None = 80, driver: str = "grpo"
) -> dict[str, str]:
    config: dict[str, Any] = {
        "policy": {
            "generation": {"vllm_cfg": {"tensor_parallel_size": 1}},
            "megatron_cfg": {"enabled": True, "optimizer": {"use_distributed_optimizer": True}},
        },
        "cluster": {"num_nodes": 1, "gpus_per_node": gpus},
    }
    for path, value in overrides.items():
        put(config, path, value)
    model = ModelSpec.of(SHAPE)
    modules = PluginManager().pin_policy(Pins(), model.names).report()
    section = wake_up_section(Sections(config, DRIVERS[driver]), model, modules, memory)
    return {row[0]: row[1] for row in section.rows}


def gibibytes(text: str) -> float:
    return float(text.partition(" GiB")[0])


@pytest.mark.parametrize(
    ("overrides", "gpus", "memory", "each"),
    [
        ({}, 8, 80, 4),
        (AWARE, 1, 141, 0),
        ({"policy.offload_optimizer_for_refit": False}, 8, 80, 12),
        ({"policy.offload_optimizer_for_refit": False, **AWARE}, 8, 80, 10),
        ({"policy.megatron_cfg.enabled": False}, 8, 80, 0),
    ],
)
def test_the_advice_is_a_third_of_what_weights_and_trainer_leave(
    overrides: dict[str, Any], gpus: int, memory: float, each: int
) -> None:
    shown = told(overrides, gpus, memory)
    trainer = each * PARAMETERS / gpus / GIB
    assert gibibytes(shown["less what the trainer leaves"]) == pytest.approx(trainer, abs=0.01)
    assert gibibytes(shown["less the weights in vLLM"]) == pytest.approx(WEIGHTS, rel=0.01)
    expected = int((memory - WEIGHTS - trainer) / 3)
    assert shown["write"] == f"{CACHE_KEY}: {expected * GIB}  # {expected} GiB"


def test_the_trainer_leaves_what_was_measured() -> None:
    """The trainer of Qwen3-8B on one H200, as torch's allocator counted while vLLM generated."""
    results = ROOT / "benchmarks" / "results" / "nemo_rl_real_8b_h200.json"
    found = json.loads(results.read_text(encoding="utf-8"))["memory_gib_of_the_trainer"]
    allocated, _ = found["while vLLM generates, allocated; reserved"]
    # benchmarks/nemo_rl_yaml.py sets both for this model on one GPU.
    shown = told({"policy.offload_optimizer_for_refit": False, **AWARE}, 1, 139.8)
    assert gibibytes(shown["less what the trainer leaves"]) == pytest.approx(allocated, rel=0.005)


@pytest.mark.parametrize(
    ("overrides", "arguments", "text"),
    [
        ({"policy.generation.colocated": APART}, {}, "not needed: vLLM has GPUs of its own"),
        ({}, {"memory": None}, "no GPU here; run this where the run will, or give --gpu-memory"),
        ({}, {"driver": "ppo"}, "cannot be told: PPO's value model"),
        ({"env.reward_model.model_name": "m"}, {}, "'env.reward_model' has GPUs of the cluster"),
        ({f"{OPTIMIZER}.optimizer_cpu_offload": True}, {}, "an unknown part on the GPU"),
        ({f"{OPTIMIZER}.use_distributed_optimizer": False}, {}, "optimizer' is false"),
        ({}, {"gpus": 1, "memory": 40}, "use_precision_aware_optimizer: true"),
        (AWARE, {"memory": 8}, "less than 1 GiB is left; raise 'policy.generation.vllm_cfg.tensor"),
    ],
)
def test_where_there_is_nothing_to_write_the_doctor_says_why(
    overrides: dict[str, Any],
    arguments: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = told(overrides, **arguments)
    assert text in shown[CACHE_KEY] and "write" not in shown


def test_without_a_given_size_the_fullest_gpu_here_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [79 * GIB, 60 * GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 80 * GIB))
    shown = told(AWARE, memory=None)
    assert shown["free on a GPU"] == "60.00 GiB, measured, the least of 2"
    assert shown["write"].endswith("# 17 GiB")  # (60 - 8.83) / 3

"""Memory of a GPU in rollout and the GPUs of a run, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fp8rl import PluginManager
from fp8rl.models.sizes import GIB, Sizes, gib
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVDtype, Pins
from nemo_rl_ext.config.drivers import DRIVERS
from nemo_rl_ext.config.keys import Sections
from nemo_rl_ext.doctor import memory

DENSE = {
    "model_type": "qwen3",
    "tie_word_embeddings": False,
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def test_rollouts() -> None:
    model = ModelSpec.of(DENSE)
    rows = PluginManager().pin_policy(Pins(first=1), model.names).report()
    vllm = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    policy = {"policy": {"generation": {"vllm_cfg": vllm}}}
    sections = Sections(policy, DRIVERS["grpo"])
    need = Sizes(model, 2).bytes(rows, 2, "fp8_e4m3")
    assert need.codes == 5 * (256 * 64 * (8 + 4 + 4 + 8) + 3 * 256 * 384) // 2
    problems: list[str] = []

    def show(dtype: KVDtype, gpu_memory: float | None = None) -> dict[str, str]:
        (found,) = memory.rollout_section(sections, model, rows, dtype, gpu_memory, problems)
        return {row[0]: row[1] for row in found.rows}

    shown = show("fp8_e4m3")
    # 6 layers, K and V, 2 heads on a rank: 64 elements of a byte, or of two; INT8's have a scale
    assert shown["KV cache, bytes a token"] == "1,536 in FP8; 3,072 in BF16"
    assert shown["of these"].startswith(f"{gib(need.codes)} FP8 codes")
    assert shown["tokens in a GiB of cache"] == f"{GIB // 1536:,}"
    shown = show("int8_per_token_head")
    assert shown["KV cache, bytes a token"] == "1,632 in INT8; 3,072 in BF16"
    assert shown["room for the cache"].startswith("50% of a GPU less the weights")
    assert show("fp8_e4m3", 2.0)["tokens that fit"] == f"{(GIB - need.weights) // 1536:,}"
    assert not problems
    assert show("fp8_e4m3", 0.001)["tokens that fit"] == "0"
    assert "more than the 50% of 0.001 GiB that vLLM may use; raise 'policy" in problems[0]
    # A cache of a given size needs no size of the GPU.
    sections.generation["vllm_kwargs"] = {"kv_cache_memory_bytes": 3072 * 10}  # type: ignore[index]
    assert show("auto")["tokens that fit"] == "10"


RM = {"env_name": "reward_model"}
TEACHERS = {
    "enabled": True,
    "teacher_model_by_agent_name": {"math": "big", "code": "big", "chat": "other"},
    "non_colocated_teachers": {
        "enabled": True,
        "default_teacher_cfg": {"num_nodes": 2},
        "teacher_overrides": {"math": {"num_nodes": 3}, "code": {"num_nodes": 4}},
    },
}
EACH = TEACHERS | {"deduplicate_shared_teacher_checkpoints": False}
POLICY_TEACHERS = "on_policy_distillation"


@pytest.mark.parametrize(
    ("driver", "nodes", "settings", "left"),
    [
        ("grpo", 2, {}, 16),
        ("grpo", 1, {"data": {"default": RM}}, 6),
        ("ppo", 4, {"data": {"train": [{"env_name": "math"}, RM]}}, 24),
        ("distillation", 4, {"data": {"default": RM}}, 32),
        ("grpo", 8, {POLICY_TEACHERS: TEACHERS}, 24),
        ("grpo", 16, {POLICY_TEACHERS: EACH}, 56),
        ("single_controller", 8, {POLICY_TEACHERS: TEACHERS}, 64),
    ],
)
def test_gpus_of_reward_models_and_teachers_are_not_the_runs(
    driver: str, nodes: int, settings: dict[str, Any], left: int
) -> None:
    for resources, rollout in (
        (None, left),
        ({"num_nodes": 1, "gpus_per_node": 4}, 4),
        ({"num_nodes": None, "gpus_per_node": 2}, 2),
    ):
        colocated = {"enabled": resources is None, "resources": resources}
        config = {
            "policy": {"generation": {"backend": "vllm", "colocated": colocated}},
            "env": {"reward_model": {"resources": {"num_nodes": 1, "gpus_per_node": 2}}},
            "cluster": {"num_nodes": nodes, "gpus_per_node": 8},
            **settings,
        }
        shared = resources is None
        expected = memory.GPUs(rollout, left if shared else left - rollout, shared=shared)
        assert memory.gpus_of(Sections(config, DRIVERS[driver])) == expected

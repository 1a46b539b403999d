"""GPUs of a run, and the weights and KV cache of one in rollout, from a config and its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8rl.models.pins import PinRow
from fp8rl.models.sizes import GIB, Sizes, gib, mib
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import Section
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.drivers import VLLM
from nemo_rl_ext.config.keys import Sections

CACHES: dict[KVDtype, str] = {"fp8_e4m3": "FP8", "int8_per_token_head": "INT8", "auto": "BF16"}
"""Formats of a KV cache, for people."""


@dataclass(frozen=True)
class GPUs:
    """How many GPUs a run gives to vLLM and to the trainer."""

    rollout: int
    training: int
    shared: bool
    """Whether both have these GPUs in turn."""


def gpus_of(sections: Sections) -> GPUs:
    """Count the GPUs as NeMo RL's drivers do, which first give some to reward models and teachers.

    Source: ``setup`` in ``nemo_rl/algorithms/grpo.py`` and ``ppo.py``.
    """
    cluster = sections.at("cluster")
    nodes, each = int(cluster.get("num_nodes") or 1), int(cluster.get("gpus_per_node") or 1)
    policy = max(nodes * each - _given_away(sections, nodes, each), 0)
    colocated = sections.at("policy.generation.colocated")
    if not sections.generation or colocated.get("enabled", True):
        return GPUs(policy, policy, shared=True)
    resources = sections.at("policy.generation.colocated.resources")
    rollout = int(resources.get("num_nodes") or 1) * int(resources.get("gpus_per_node") or each)
    return GPUs(rollout, max(policy - rollout, 0), shared=False)


def _given_away(sections: Sections, nodes: int, each: int) -> int:
    """Count the GPUs of a reward model and of teachers: whole nodes, except of a single one."""
    driver, found = sections.driver.name, 0
    if driver in ("grpo", "ppo") and "reward_model" in _environments(sections.at("data")):
        resources = sections.at("env.reward_model.resources")
        found += (
            int(resources.get("gpus_per_node") or 0)
            if nodes == 1
            else int(resources.get("num_nodes") or 0) * each
        )
    if driver == "grpo":
        found += _teacher_nodes(sections) * each
    return found


def _environments(data: Mapping[str, Any]) -> set[Any]:
    """Return the names of the environments that the data sets of a run use."""
    found = set()
    for given in (data.get(key) for key in ("train", "validation", "default")):
        for entry in given if isinstance(given, list) else [given]:
            if isinstance(entry, Mapping):
                found.add(entry.get("env_name"))
    return found


def _teacher_nodes(sections: Sections) -> int:
    """Count the nodes of the teachers that have GPUs of their own; aliases may share a teacher."""
    distillation = sections.at("on_policy_distillation")
    settings = sections.at("on_policy_distillation.non_colocated_teachers")
    if not distillation.get("enabled") or not settings.get("enabled"):
        return 0
    share = distillation.get("deduplicate_shared_teacher_checkpoints", True)
    default = sections.at("on_policy_distillation.non_colocated_teachers.default_teacher_cfg")
    overrides = settings.get("teacher_overrides") or {}
    nodes, seen = 0, set()
    for alias, model in (distillation.get("teacher_model_by_agent_name") or {}).items():
        if share and model in seen:
            continue
        seen.add(model)
        teacher = {**default, **(overrides.get(alias) or {})}
        nodes += int(teacher.get("num_nodes", 1))
    return nodes


def rollout_sizes(sections: Sections, model: ModelSpec) -> Sizes:
    """Return the sizes of a model as vLLM splits it."""
    ranks = int(sections.vllm.get("tensor_parallel_size") or 1)
    expert_parallel = int(sections.vllm.get("expert_parallel_size") or 1)
    return Sizes(model, ranks, expert_ranks=expert_parallel if expert_parallel > 1 else None)


def rollout_section(
    sections: Sections,
    model: ModelSpec,
    modules: Sequence[PinRow],
    kv_dtype: KVDtype,
    gpu_memory: float | None,
    problems: list[str],
) -> list[Section]:
    """Describe the memory of vLLM on one GPU in a table; none where it cannot hold the model.

    Args:
        gpu_memory: of a GPU, in GiB; None if it is not known.
        problems: gets a sentence for a model that cannot be split, or weights that do not fit.
    """
    vllm, sizes = sections.vllm, rollout_sizes(sections, model)
    if (why_not := sizes.split_problem()) is not None:
        problems.append(f"'{VLLM}.tensor_parallel_size': {why_not}")
        return []
    need, plain_kv = sizes.bytes(modules, 2, kv_dtype), sizes.kv_per_token(2, "auto", modules)
    rows = [("weights", gib(need.weights))]
    if need.codes:
        parts = f"{gib(need.codes)} FP8 codes, {mib(need.scales)} scales, {gib(need.plain)} BF16"
        rows.append(("of these", parts))
    a_token = f"{need.kv_per_token:,}"
    if need.kv_per_token != plain_kv:
        a_token += f" in {CACHES[kv_dtype]}; {plain_kv:,} in BF16"
    rows.append(("KV cache, bytes a token", a_token))
    share = float(vllm.get("gpu_memory_utilization") or 0.9)
    fixed = sections.at("policy.generation.vllm_kwargs").get("kv_cache_memory_bytes")
    if fixed:
        cache: float | None = float(fixed)
        why = "policy.generation.vllm_kwargs.kv_cache_memory_bytes"
    elif gpu_memory is not None:
        cache = gpu_memory * share * GIB - need.weights
        why = f"{share:.0%} of {gpu_memory:g} GiB less the weights, before activations and graphs"
        if cache <= 0:
            problems.append(
                f"The weights take {gib(need.weights)} a GPU, more than the {share:.0%} of "
                f"{gpu_memory:g} GiB that vLLM may use; raise 'policy.generation.vllm_cfg."
                "tensor_parallel_size' or 'gpu_memory_utilization'."
            )
            cache = 0
    else:
        cache, why = None, ""
    if cache is None:
        rows.append(("tokens in a GiB of cache", f"{GIB // need.kv_per_token:,}"))
        room = f"{share:.0%} of a GPU less the weights; --gpu-memory gives the number"
        rows.append(("room for the cache", room))
    else:
        rows.append(("room for the cache", f"{gib(int(cache))} ({why})"))
        rows.append(("tokens that fit", f"{int(cache) // need.kv_per_token:,}"))
    ranks = vllm.get("tensor_parallel_size") or 1
    return [Section(f"memory of a GPU in rollout: vLLM, TP {ranks}", ("", ""), tuple(rows))]

"""Memory of one GPU in rollout and in training, from a config and the shape of its model.

Weights, KV cache, gradients and optimizer states are counted. Activations, CUDA graphs and buffers
of communication are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8rl.adapters import Section
from fp8rl.pinning import PinRow
from fp8rl.recipe import KVDtype
from fp8rl.sizes import ADAM_BYTES, GIB, Bytes, Sizes, gib, mib
from nemo_rl_ext.config.keys import Sections

_PRECISION_AWARE_BYTES = 10
"""The same with ``use_precision_aware_optimizer``, which keeps 2 bytes of a main weight beside the
BF16 weight (``store_param_remainders``, Megatron-Core's default)."""


CACHES: dict[KVDtype, str] = {"fp8_e4m3": "FP8", "int8_per_token_head": "INT8", "auto": "BF16"}
"""Formats of a KV cache, for people."""


@dataclass(frozen=True)
class GPUs:
    """How many GPUs a run gives to vLLM and to the trainer."""

    rollout: int
    training: int
    shared: bool
    """The same GPUs serve both, in turn."""


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
        found += _teacher_nodes(sections.at("on_policy_distillation")) * each
    return found


def _environments(data: Mapping[str, Any]) -> set[Any]:
    """Names of the environments that the data sets of a run use."""
    found = set()
    for given in (data.get(key) for key in ("train", "validation", "default")):
        for entry in given if isinstance(given, list) else [given]:
            if isinstance(entry, Mapping):
                found.add(entry.get("env_name"))
    return found


def _teacher_nodes(distillation: Mapping[str, Any]) -> int:
    """Count the nodes of the teachers that have GPUs of their own; aliases may share a teacher."""
    settings = distillation.get("non_colocated_teachers") or {}
    if not distillation.get("enabled") or not settings.get("enabled"):
        return 0
    share = distillation.get("deduplicate_shared_teacher_checkpoints", True)
    default, overrides = settings.get("default_teacher_cfg"), settings.get("teacher_overrides")
    nodes, seen = 0, set()
    for alias, model in (distillation.get("teacher_model_by_agent_name") or {}).items():
        if share and model in seen:
            continue
        seen.add(model)
        teacher = {**(default or {}), **((overrides or {}).get(alias) or {})}
        nodes += int(teacher.get("num_nodes", 1))
    return nodes


@dataclass(frozen=True)
class Rollout:
    """Memory of vLLM on one GPU."""

    weights: Bytes
    kv_dtype: KVDtype
    bf16_kv_per_token: int
    """Bytes of a token in a KV cache in the model's dtype."""
    split_problem: str | None
    """Why the model cannot be split over so many GPUs."""


def rollout_memory(
    sections: Sections, model: Mapping[str, Any], rows: Sequence[PinRow], kv_dtype: KVDtype
) -> Rollout:
    """Count the bytes of an engine on one GPU.

    Args:
        sections: the config.
        model: values of the model's ``config.json``.
        rows: resolved table of the model's modules in the rollout engine.
        kv_dtype: of the KV cache.
    """
    ranks = int(sections.vllm.get("tensor_parallel_size") or 1)
    expert_parallel = int(sections.vllm.get("expert_parallel_size") or 1)
    sizes = Sizes.from_dict(
        model, ranks, expert_ranks=expert_parallel if expert_parallel > 1 else None
    )
    return Rollout(
        sizes.bytes(rows, 2, kv_dtype),
        kv_dtype,
        sizes.kv_per_token(2, "auto", rows),
        sizes.split_problem(),
    )


def rollout_section(
    sections: Sections, rollout: Rollout, gpu_memory: float | None, problems: list[str]
) -> Section:
    """Describe :class:`Rollout` in a table; weights that do not fit are a problem."""
    need, plain_kv = rollout.weights, rollout.bf16_kv_per_token
    ranks = int(sections.vllm.get("tensor_parallel_size") or 1)
    rows = [("weights", gib(need.weights))]
    if need.codes:
        rows.append(
            (
                "of these",
                f"{gib(need.codes)} FP8 codes, {mib(need.scales)} scales, {gib(need.plain)} BF16",
            )
        )
    rows.append(("KV cache, bytes a token", f"{need.kv_per_token:,}"))
    if need.kv_per_token != plain_kv:
        held = CACHES[rollout.kv_dtype]
        rows[-1] = (rows[-1][0], f"{need.kv_per_token:,} in {held}; {plain_kv:,} in BF16")
    share = float(sections.vllm.get("gpu_memory_utilization") or 0.9)
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
    return Section(f"memory of a GPU in rollout: vLLM, TP {ranks}", ("", ""), tuple(rows))


@dataclass(frozen=True)
class Training:
    """Memory of a Megatron trainer on one GPU, that of the pipeline stage with the most weights."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


def training_memory(
    sections: Sections, model: Mapping[str, Any], rows: Sequence[PinRow], gpus: int
) -> Training | None:
    """Count the bytes of a Megatron trainer on one GPU.

    Args:
        sections: the config, with ``policy.megatron_cfg.enabled``.
        model: values of the model's ``config.json``.
        rows: all modules of the model.
        gpus: number of GPUs that train.

    Returns:
        None for an optimizer other than Adam, and for LoRA.
    """
    megatron = sections.megatron
    optimizer = megatron.get("optimizer") or {}
    if optimizer.get("optimizer", "adam") != "adam" or (megatron.get("peft") or {}).get("enabled"):
        return None
    tensor, pipeline = (ranks_of(megatron, kind) for kind in ("tensor_model", "pipeline_model"))
    expert_ranks = ranks_of(megatron, "expert_model") * ranks_of(megatron, "expert_tensor")
    sizes = Sizes.from_dict(model, tensor, expert_ranks=expert_ranks)
    dense, experts = max(
        (
            [
                sizes.elements([row for row in stage if (row.kind == "experts") == experts])
                for experts in (False, True)
            ]
            for stage in _stages(rows, megatron, pipeline, sizes.tied)
        ),
        key=sum,
    )
    itemsize = 2 if sections.policy.get("precision") in ("bfloat16", "float16") else 4
    ddp = megatron.get("distributed_data_parallel_config") or {}
    each = _PRECISION_AWARE_BYTES if optimizer.get("use_precision_aware_optimizer") else ADAM_BYTES
    states = 0
    for count, ranks in ((dense, tensor), (experts, expert_ranks)):
        copies = gpus // (ranks * pipeline) if optimizer.get("use_distributed_optimizer") else 1
        states += each * count // max(copies, 1)
    if optimizer.get("optimizer_cpu_offload"):
        states = int(states * (1 - float(optimizer.get("optimizer_offload_fraction") or 0)))
    return Training(
        weights=itemsize * (dense + experts),
        gradients=(4 if ddp.get("grad_reduce_in_fp32") else itemsize) * (dense + experts),
        optimizer=states,
    )


def training_section(sections: Sections, training: Training, fp8: bool) -> Section:
    """Describe :class:`Training` in a table; ``fp8`` says whether the trainer runs in FP8."""
    megatron = sections.megatron
    tensor, pipeline = (ranks_of(megatron, kind) for kind in ("tensor_model", "pipeline_model"))
    expert = ranks_of(megatron, "expert_model")
    layout = f"TP {tensor}, PP {pipeline}" + (f", EP {expert}" if expert > 1 else "")
    optimizer = megatron.get("optimizer") or {}
    shared = ", shared by the replicas" if optimizer.get("use_distributed_optimizer") else ""
    codes = "; FP8 codes come on top in a call, where it has room for them" if fp8 else ""
    return Section(
        f"memory of a GPU in training: Megatron, {layout}"
        + (" (the largest stage)" if pipeline > 1 else ""),
        ("", ""),
        (
            ("weights", gib(training.weights) + codes),
            ("gradients", gib(training.gradients)),
            ("main weights, Adam's moments", f"{gib(training.optimizer)}{shared}"),
            ("all of it", f"{gib(training.total)}, without activations"),
        ),
    )


def ranks_of(megatron: Mapping[str, Any], kind: str) -> int:
    """Return a parallel size of the trainer, 1 by default; ``kind`` is e.g. ``tensor_model``."""
    return int(megatron.get(f"{kind}_parallel_size") or 1)


def _stages(
    rows: Sequence[PinRow], megatron: Mapping[str, Any], count: int, tied: bool
) -> Iterator[list[PinRow]]:
    """Yield the modules of each of ``count`` pipeline stages."""
    layers = 1 + max(row.layer for row in rows if row.layer is not None)
    ends = {
        number: int(given)
        for number, key in ((0, "first"), (count - 1, "last"))
        if (given := megatron.get(f"num_layers_in_{key}_pipeline_stage"))
    }
    middle = -(-(layers - sum(ends.values())) // max(count - len(ends), 1))
    embedding = [row for row in rows if row.kind == "embed_tokens"]
    towers = [row for row in rows if row.kind == "tower"]
    output = [row for row in rows if row.layer is None and row not in (*embedding, *towers)]
    if tied and count > 1:
        output += embedding  # the last stage has a copy of it
    start = 0
    for number in range(count):
        stop = layers if number == count - 1 else start + ends.get(number, middle)
        stage = [row for row in rows if row.layer is not None and start <= row.layer < stop]
        stage += [*towers, *embedding] if number == 0 else []
        yield stage + (output if number == count - 1 else [])
        start = stop

"""How large vLLM's KV cache may be, so that it fits beside the trainer when vLLM wakes up.

On GPUs that both have in turn, vLLM takes its KV cache while no trainer is there, frees it for
training, and takes it again beside what the trainer leaves behind. Per GPU, in bytes::

    kv_cache_memory_bytes = (free - weights - trainer) / 3

Two thirds are the reserve: activations and graphs of vLLM, CUDA contexts, memory that the
trainer's allocator keeps. None of these follow from a config. On GPUs of 80 GiB the third is 23 GiB
and 20 GiB for the two FP8 configs of upstream's that have the key, 20 GiB each, found by trial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.models.pins import PinRow
from fp8rl.models.sizes import GIB, Sizes, gib
from fp8rl.models.spec import ModelSpec
from fp8rl.plugins.adapters import Section
from nemo_rl_ext.config.drivers import MEGATRON, VLLM
from nemo_rl_ext.config.keys import Sections

CACHE_KEY = "policy.generation.vllm_kwargs.kv_cache_memory_bytes"
SHARE = 3
"""The KV cache gets one part in so many of what weights and trainer leave."""
_OPTIMIZER = f"{MEGATRON}.optimizer"
_OTHER_MODELS = ("env.reward_model", "on_policy_distillation.non_colocated_teachers")
"""Sections of models that get GPUs of the cluster before the trainer does."""


def rollout_sizes(sections: Sections, model: ModelSpec) -> Sizes:
    """Return the sizes of a model as vLLM splits it."""
    ranks = int(sections.vllm.get("tensor_parallel_size") or 1)
    expert_parallel = int(sections.vllm.get("expert_parallel_size") or 1)
    return Sizes(model, ranks, expert_ranks=expert_parallel if expert_parallel > 1 else None)


def wake_up_section(
    sections: Sections, model: ModelSpec, modules: Sequence[PinRow], gpu_memory: float | None
) -> Section:
    """Say which ``kv_cache_memory_bytes`` to write, with every term of it.

    Args:
        gpu_memory: of a GPU, in GiB; None: the free memory of the GPUs here is measured.
    """
    found = _rows(sections, model, modules, gpu_memory)
    return Section("KV cache when vLLM wakes up", ("", ""), tuple(found.items()))


def _rows(
    sections: Sections, model: ModelSpec, modules: Sequence[PinRow], gpu_memory: float | None
) -> dict[str, str]:
    if not sections.at("policy.generation.colocated").get("enabled", True):
        return {CACHE_KEY: "not needed: vLLM has GPUs of its own, and does not sleep"}
    each, why = _stays(sections)
    if each is None:
        return {CACHE_KEY: f"cannot be told: {why}"}
    free, measured = _free(gpu_memory)
    if free is None:
        return {CACHE_KEY: f"cannot be told: {measured}"}
    weights = rollout_sizes(sections, model).bytes(modules, 2, "auto").weights
    cluster = sections.at("cluster")
    gpus = int(cluster.get("num_nodes") or 1) * int(cluster.get("gpus_per_node") or 1)
    trainer = each * Sizes(model, 1).elements(modules) // gpus
    rows = {
        "free on a GPU": f"{gib(free)}, {measured}",
        "less the weights in vLLM": gib(weights),
        "less what the trainer leaves": f"{gib(trainer)}: {why}",
    }
    left = max(free - weights - trainer, 0)
    rows["of the rest, reserved"] = (
        f"{gib(left - left // SHARE)}, two thirds: activations and graphs of vLLM, CUDA contexts, "
        "memory that the trainer's allocator keeps"
    )
    advised = left // SHARE // GIB
    if not advised:
        rows[CACHE_KEY] = f"less than 1 GiB is left; raise '{VLLM}.tensor_parallel_size'"
        if each:
            rows[CACHE_KEY] += (
                f", or set '{_OPTIMIZER}.use_precision_aware_optimizer: true' and leave "
                "'policy.offload_optimizer_for_refit' true, with which the trainer leaves nothing"
            )
        return rows
    rows["write"] = f"{CACHE_KEY}: {advised * GIB}  # {advised} GiB"
    given = sections.at("policy.generation.vllm_kwargs").get("kv_cache_memory_bytes")
    if given is not None:
        more = ", which is more" if given > advised * GIB else ""
        rows["the config has"] = f"{given}, {gib(given)}{more}"
    return rows


def _free(gpu_memory: float | None) -> tuple[int | None, str]:
    """Return the bytes that a GPU has free, and where the number is from, or why there is none."""
    if gpu_memory is not None:
        return int(gpu_memory * GIB), "by --gpu-memory"
    if not torch.cuda.is_available():
        return None, "there is no GPU here; run this where the run will, or give --gpu-memory"
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(torch.cuda.device_count())]
    return min(free), f"measured, the least of {len(free)}"


def _stays(sections: Sections) -> tuple[int | None, str]:
    """Return the bytes of each parameter that a trainer leaves on its GPUs while vLLM is awake.

    All ranks together have them once. NeMo RL moves weights, frees gradients, and moves the
    optimizer's state, but of a Megatron optimizer not the FP32 weights, which are no state unless
    it is precision-aware.

    Source: ``offload_before_refit``, ``offload_after_refit``, ``move_optimizer`` of the workers;
    ``_build_model_and_main_param_groups`` in Megatron-LM's ``distrib_optimizer.py``.

    Returns:
        The bytes and what they are; None, and why they cannot be told.
    """
    if not sections.megatron.get("enabled"):
        return 0, f"{sections.other_trainer} weights and optimizer state go to the host"
    for path in _OTHER_MODELS:
        if sections.at(path) and sections.at(path).get("enabled", True):
            return None, f"'{path}' has GPUs of the cluster too"
    optimizer = sections.at(_OPTIMIZER)
    if sections.driver.name == "ppo":
        return None, "PPO's value model, whose size no config says, is there too"
    if optimizer.get("optimizer_cpu_offload"):
        return None, f"'{_OPTIMIZER}.optimizer_cpu_offload' leaves an unknown part on the GPU"
    if not optimizer.get("use_distributed_optimizer", True):
        return None, f"'{_OPTIMIZER}.use_distributed_optimizer' is false"
    aware = optimizer.get("use_precision_aware_optimizer")
    offloaded = sections.policy.get("offload_optimizer_for_refit")
    if offloaded is None or offloaded:
        if aware:
            return 0, "weights and optimizer go to the host"
        return 4, "the optimizer's FP32 weights, 4 bytes a parameter over all GPUs"
    # Two moments in FP32, beside them the weights in FP32, or 16 bits that BF16 weights lack.
    return (10 if aware else 12), f"the optimizer, {10 if aware else 12} bytes a parameter"

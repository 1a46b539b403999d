"""KV scales of the trainer in refits of loops that ask for none.

Why: asynchronous GRPO never sends KV scales, and the single controller none with its first refit;
engines with requests in flight cannot calibrate themselves.
How: wraps ``Policy.broadcast_weights_for_collective``: where the engines are asynchronous, have an
FP8 cache and were given no scales, it asks the trainer with upstream's own
``calibrate_qkv_fp8_scales``. Our worker answers from the step's forwards; before the first of them
it runs the batch that comes with the call, whose tokens are random. The second method is wrapped
too, so that the metrics tell how many scales the values of a batch have left.
Upstream: ``nemo_rl/models/policy/lm_policy.py``, ``nemo_rl/distributed/batched_data_dict.py``.
Until: these loops send KV scales.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from fp8rl.errors import ModelError
from nemo_rl_ext.config.plan import RunPlan
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches.upstream import Upstream, resolve

SEQUENCES, LENGTH = 4, 512
"""Sequences for each data-parallel rank, and their length, of the first calibration."""

_MODULE = "nemo_rl.models.policy.lm_policy"
UPSTREAM = (
    Upstream(_MODULE, "Policy.broadcast_weights_for_collective", "self, kv_scales=..."),
    Upstream(
        _MODULE,
        "Policy.calibrate_qkv_fp8_scales",
        "self, data, *, micro_batch_size=..., include_q=...",
    ),
    Upstream(_MODULE, "Policy.data_parallel_size"),
    Upstream("nemo_rl.distributed.batched_data_dict", "BatchedDataDict"),
)


def apply(module: ModuleType, finder: PatchFinder) -> None:
    broadcast, calibrate = (resolve(module, upstream) for upstream in UPSTREAM[:2])

    @functools.wraps(broadcast)
    def with_scales(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(broadcast).bind(*args, **kwargs)
        policy = given.arguments["self"]
        plan = RunPlan.of(policy.cfg)
        lacking = given.arguments.get("kv_scales") is None and asynchronous(policy.cfg)
        if lacking and plan is not None and plan.kv_scales == "trainer":
            batch = random_batch(policy.cfg, policy.data_parallel_size)
            found = policy.calibrate_qkv_fp8_scales(batch, micro_batch_size=1, include_q=True)
            given.arguments["kv_scales"] = found["layers"]
        return broadcast(*given.args, **given.kwargs)

    @functools.wraps(calibrate)
    def counting(*args: Any, **kwargs: Any) -> Any:
        result = calibrate(*args, **kwargs)
        if finder.run.correction is not None and "outgrown" in result:
            finder.run.correction.outgrown = len(result["outgrown"])
        return result

    module.Policy.broadcast_weights_for_collective = with_scales  # type: ignore[attr-defined]
    module.Policy.calibrate_qkv_fp8_scales = counting  # type: ignore[attr-defined]


def asynchronous(policy: Mapping[str, Any]) -> bool:
    """Tell whether the engines of a policy are asynchronous."""
    return bool(policy["generation"]["vllm_cfg"].get("async_engine"))


def random_batch(policy: Mapping[str, Any], ranks: int) -> Any:
    """Make a batch of random tokens, the same in every process."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from nemo_rl_ext.config.model_pins import model_config

    vocabulary = model_config(policy).get("vocab_size")
    if vocabulary is None:
        raise ModelError(
            f"'{policy.get('model_name')}': its config.json, with the vocab_size for a first "
            "calibration of KV scales, cannot be read here; set "
            "'policy.generation.vllm_cfg.fp8rl.kv_cache.dtype' to auto."
        )
    multiple = policy["make_sequence_length_divisible_by"]
    length = min(LENGTH, policy["max_total_sequence_length"]) // multiple * multiple
    generator = torch.Generator().manual_seed(0)
    size = (SEQUENCES * ranks, max(length, multiple))
    ids = torch.randint(vocabulary, size, generator=generator)
    lengths = torch.full(size[:1], size[1], dtype=torch.int32)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})

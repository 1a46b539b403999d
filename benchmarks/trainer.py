"""NeMo RL's Megatron worker alone, on a model of real size: its seconds, and where they go.

    python benchmarks/trainer.py CONFIG.yaml [--sequences 32] [--repeats 2] [--profile FOLDER]
                                 [--set KEY=VALUE]... [--out FILE]

Takes a YAML that ``nemo_rl.py --task real`` has written (``--write-only`` writes it alone), builds
the worker that ``run_grpo.py`` would, as a Ray actor on one GPU, without a vLLM, and gives it
batches of random tokens: log-probabilities, then training with an optimizer step. The first call of
each kind, which compiles kernels, is left out of the medians.

A model of fewer layers, here eight of 8B in micro-batches of 8,192 tokens, is a few keys away:

    python benchmarks/real_model.py out/8-layers --size 8b --layers 8
    python benchmarks/trainer.py out/real/megatron-fp8rl-8b.yaml --sequences 32 \\
        --set policy.model_name=$PWD/out/8-layers --set policy.max_total_sequence_length=4096 \\
        --set policy.train_micro_batch_size=2 --set policy.logprob_batch_size=2 \\
        --set policy.megatron_cfg.activation_checkpointing=false

``--profile`` adds one call of each kind of two micro-batches under torch's profiler: the time in
which the GPU works, kernels and host operations by their time, and the time line for
``chrome://tracing``. A GPU that works for less than the whole call waits for the host. The profiler
itself slows the host, so a share below 1 is an upper bound of what the host costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from nemo_rl_config import add_arguments, read_config

TOP = 45
"""Kernels and host operations of a profile."""


def worker_class(fp8: bool) -> Any:
    """Return the actor's class: the worker of a variant, which can measure itself."""
    if fp8:
        from nemo_rl_ext.workers.megatron import Fp8MegatronPolicyWorkerImpl as Worker
    else:
        from nemo_rl.models.policy.workers.megatron_policy_worker import (
            MegatronPolicyWorkerImpl as Worker,
        )

    class Measured(Worker):
        def measure(self, loss: Any, sequences: int, repeats: int) -> dict[str, Any]:
            batch, seconds = made_batch(self.tokenizer, self.cfg, sequences), {}
            for name, call in self.calls(batch, loss).items():
                taken = [timed(call) for _ in range(repeats + 1)]
                seconds[name] = {"first": taken[0], "median": statistics.median(taken[1:])}
            return {
                "seconds": seconds,
                "sequences": sequences,
                "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
                "niceness": os.nice(0),
                "threads": torch.get_num_threads(),
                "cores": len(os.sched_getaffinity(0)),
            }

        def profile(self, loss: Any, folder: str) -> dict[str, Any]:
            micro = self.cfg["train_micro_batch_size"]
            batch = made_batch(self.tokenizer, self.cfg, 2 * micro)
            calls = self.calls(batch, loss)
            for call in calls.values():
                call()  # what a smaller batch compiles
            return {name: profiled(call, Path(folder, name)) for name, call in calls.items()}

        def calls(self, batch: Any, loss: Any) -> dict[str, Callable[[], object]]:
            sequences = len(batch["input_ids"])
            return {
                "get_logprobs": lambda: self.get_logprobs(data=batch),
                "train": lambda: self.train(batch, loss, gbs=sequences),
            }

    return Measured


def made_batch(tokenizer: Any, policy: Any, sequences: int) -> Any:
    """Return a batch of a GRPO step with random tokens of the config's lengths, on the CPU."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    generator = torch.Generator().manual_seed(0)
    length = policy["max_total_sequence_length"]
    tokens = torch.randint(0, len(tokenizer), (sequences, length), generator=generator)
    mask = torch.zeros(sequences, length)
    mask[:, -policy["generation"]["max_new_tokens"] :] = 1
    logprobs = -11.9 * mask  # of a nearly uniform policy over 151,936 words
    advantages = torch.randn(sequences, 1, generator=generator).expand(-1, length).contiguous()
    return BatchedDataDict(
        {
            "input_ids": tokens,
            "input_lengths": torch.full((sequences,), length),
            "advantages": advantages,
            "prev_logprobs": logprobs,
            "generation_logprobs": logprobs.clone(),
            "reference_policy_logprobs": logprobs.clone(),
            "token_mask": mask,
            "sample_mask": torch.ones(sequences),
        }
    )


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call on a GPU that is idle before and after."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def profiled(call: Callable[[], object], file: Path) -> dict[str, Any]:
    """Profile a call; write its time line to ``file`` with ``.json.gz`` behind its name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    plain = timed(call)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        seconds = timed(call)
    file.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{file}.json.gz")
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    rows = profiler.key_averages()

    def top(attribute: str, on_device: bool) -> list[tuple[str, int, float]]:
        chosen = [
            row
            for row in rows
            if (row.device_type == DeviceType.CUDA) == on_device
            and not (on_device and row.is_user_annotation)
        ]
        chosen.sort(key=lambda row: -getattr(row, attribute))
        return [(r.key[:150], r.count, round(getattr(r, attribute) / 1e3, 3)) for r in chosen[:TOP]]

    return {
        "milliseconds": round(1e3 * plain, 1),
        "under_profiler_milliseconds": round(1e3 * seconds, 1),
        "gpu_busy_milliseconds": round(covered(spans) / 1e3, 1),
        "gpu_operations": len(spans),
        "kernels": top("self_device_time_total", on_device=True),
        "host": top("self_cpu_time_total", on_device=False),
    }


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of what spans from a beginning to an end cover together."""
    total, until = 0.0, -math.inf
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Time NeMo RL's Megatron worker alone")
    add_arguments(parser)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()

    config, tokenizer = read_config(options)
    import numpy as np
    import ray
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn
    from nemo_rl.distributed.named_sharding import NamedSharding
    from torch.distributed.elastic.utils.distributed import get_free_port

    policy = config.policy
    policy["megatron_cfg"]["train_iters"] = config.grpo.max_num_steps
    fp8 = "fp8rl" in policy["megatron_cfg"]
    fused = bool(policy["megatron_cfg"].get("use_fused_linear_logprobs"))
    loss = ClippedPGLossFn(config.loss_fn, use_fused_linear_logprobs=fused)

    ray.init()  # a Ray of its own, or the one that RAY_ADDRESS names
    environment = {name: value for name, value in os.environ.items() if name.startswith("NRL_")}
    environment |= policy["megatron_cfg"].get("env_vars") or {}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(get_free_port())}
    # As NeMo RL's workers have it: they choose among all GPUs of the machine.
    environment |= {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    actor = ray.remote(num_gpus=1, runtime_env={"env_vars": environment})(worker_class(fp8))
    annotations = NamedSharding(
        layout=np.arange(1).reshape(1, 1, 1, 1),
        names=["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"],
    )
    worker = actor.remote(
        policy, tokenizer, init_reference_model=False, worker_sharding_annotations=annotations
    )
    found = ray.get(worker.measure.remote(loss, options.sequences, options.repeats))
    found = {"config": options.config.name, "set": options.set, "fp8": fp8, **found}
    text = json.dumps(found)
    sys.stdout.write(text + "\n")
    if options.profile is not None:
        found["profile"] = ray.get(worker.profile.remote(loss, str(options.profile.resolve())))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ray.shutdown()


if __name__ == "__main__":
    main()

"""NeMo RL's vLLM worker alone, on a model of real size: the seconds of a rollout, where they go.

    python benchmarks/rollout_worker.py CONFIG.yaml [--sequences 256,128] [--repeats 3]
                                        [--spy PY_SPY] [--set KEY=VALUE]... [--out FILE]

Takes a YAML that ``nemo_rl.py --task real`` has written (``--write-only`` writes it and the model's
``config.json``; ``real_model.py`` the weights, which are loaded here), builds the cluster and the
worker that ``run_grpo.py`` would, without a trainer, and gives it the prompts of a step: wake-up,
``generate``, sleep, as the driver does. With an FP8 KV cache the first rollout begins with vLLM's
own calibration. The first rollout is left out of the median. ``--sequences`` takes fewer than the
step has, one number after the other in the same engine.

Then one rollout tells its steps apart: milliseconds of each call of the engine's ``step`` (the
median of all, and of each tenth of the rollout), Python's garbage collections by generation, and
what ``generate`` does outside of steps. In a last one torch's profiler records ten decode steps
half-way, and the one after them that vLLM has begun. ``--spy`` names the program of py-spy, which
samples the worker's Python stacks during another rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from facts import host_loop
from nemo_rl_config import add_arguments, read_config
from nemo_rl_real import TOKENS_IN
from profiles import garbage_collections
from trainer import covered

PROFILED = 10
TOP = 40
SPY_SECONDS = 6


def made_prompts(config: Any, tokenizer: Any, tokens_in: int) -> Any:
    """Return the prompts of a step, each as often as it has samples, as the driver pads them."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    generator = torch.Generator().manual_seed(0)
    count, samples = config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt
    tokens = torch.randint(0, len(tokenizer) - 2, (count, tokens_in), generator=generator)
    return BatchedDataDict(
        {
            "input_ids": tokens.repeat_interleave(samples, dim=0),
            "input_lengths": torch.full((count * samples,), tokens_in),
        }
    )


def in_steps(worker: Any, data: Any) -> dict[str, Any]:
    """Run a rollout in the worker's process and tell its steps apart."""
    engine = worker.llm.llm_engine
    steps: list[float] = []
    inner = engine.step

    def step() -> Any:
        began = time.perf_counter()
        outputs = inner()
        steps.append(time.perf_counter() - began)
        return outputs

    engine.step = step
    began = time.perf_counter()
    try:
        with garbage_collections() as seen:
            worker.generate(data)
    finally:
        seconds = time.perf_counter() - began
        del engine.step
    tenth = max(1, len(steps) // 10)
    return {
        "seconds": seconds,
        "steps": len(steps),
        "in_steps_seconds": sum(steps),
        "step_ms": 1e3 * statistics.median(steps),
        "step_ms_by_tenth": [
            round(1e3 * statistics.median(steps[i : i + tenth]), 3)
            for i in range(0, len(steps), tenth)
        ],
        "collections": {
            number: {
                "count": len(taken),
                "seconds": sum(each.seconds for each in taken),
                "longest_ms": 1e3 * max(each.seconds for each in taken),
                "freed": sum(each.freed for each in taken),
            }
            for number in range(3)
            if (taken := [each for each in seen if each.generation == number])
        },
        "async_scheduling": engine.vllm_config.scheduler_config.async_scheduling,
        "cores": len(os.sched_getaffinity(0)),
    }


def start_profiler(vllm_worker: Any) -> None:
    """Start torch's profiler in the process that has the model."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # else the step that is on its way counts as well
    vllm_worker.rollout_profiler = profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU])
    vllm_worker.rollout_profiler.__enter__()


def stop_profiler(vllm_worker: Any) -> tuple[list[tuple[str, float, float]], dict[str, Any]]:
    """Return each kernel's name, start and end, and the host's operations; microseconds."""
    import torch

    torch.cuda.synchronize()
    profiler = vllm_worker.rollout_profiler
    profiler.__exit__(None, None, None)
    del vllm_worker.rollout_profiler
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    rows = profiler.key_averages()
    host = {r.key[:120]: [r.count, r.self_cpu_time_total] for r in rows if r.self_cpu_time_total}
    return kernels, dict(sorted(host.items(), key=lambda row: -row[1][1])[:TOP])


def profiled(worker: Any, data: Any) -> dict[str, Any]:
    """Run a rollout in the worker's process and profile PROFILED decode steps half-way.

    Returns:
        ``seconds`` of these steps by the clock; of the process that has the model ``spans``, each
        kernel's name, start and end, and ``host``, its operations; in microseconds.
    """
    engine = worker.llm.llm_engine
    inner = engine.step
    half = int(worker.cfg["max_new_tokens"]) // 2
    if half < PROFILED:
        raise ValueError(
            f"A profile needs answers of {2 * PROFILED} tokens; these have {2 * half}."
        )
    counted, marks, found = [0], [], []

    def step() -> Any:
        if counted[0] == half:
            worker.llm.collective_rpc(start_profiler)
        if half <= counted[0] <= half + PROFILED:
            marks.append(time.perf_counter())
        if counted[0] == half + PROFILED:
            found.extend(worker.llm.collective_rpc(stop_profiler))
        counted[0] += 1
        return inner()

    engine.step = step
    try:
        worker.generate(data)
    finally:
        del engine.step
    ((spans, host),) = found
    return {"seconds": marks[-1] - marks[0], "spans": spans, "host": host}


def a_step(found: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`profiled` found for one step."""
    kernels: dict[str, float] = {}
    for name, start, end in found["spans"]:
        kernels[name] = kernels.get(name, 0.0) + (end - start) / PROFILED
    times = [(start, end) for _, start, end in found["spans"]]
    return {
        "step_us_under_profiler": 1e6 * found["seconds"] / PROFILED,
        "gpu_busy_us": covered(times) / PROFILED,
        "gpu_span_us": (max(end for _, end in times) - min(times)[0]) / PROFILED,
        "kernels_us": dict(sorted(kernels.items(), key=lambda row: -row[1])[:TOP]),
        "host_us_of_all_steps": found["host"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time NeMo RL's vLLM worker alone")
    add_arguments(parser)
    parser.add_argument("--sequences", type=parse_counts)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--spy", type=Path)
    options = parser.parse_args()

    config, tokenizer = read_config(options)
    import ray
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster, init_ray
    from nemo_rl.models.generation.vllm import VllmGeneration

    init_ray()
    generation = config.policy["generation"]
    generation["model_name"] = config.policy["model_name"]
    generation["vllm_cfg"]["load_format"] = "auto"  # no trainer sends weights
    data = made_prompts(config, tokenizer, TOKENS_IN)
    began = time.perf_counter()
    cluster = RayVirtualCluster(
        name="rollout_worker",
        bundle_ct_per_node_list=[1],
        use_gpus=True,
        num_gpus_per_node=1,
        max_colocated_worker_groups=1,
    )
    engine = VllmGeneration(cluster=cluster, config=generation)
    engine.finish_generation()
    found: dict[str, Any] = {
        "config": options.config.name,
        "set": options.set,
        "start_seconds": time.perf_counter() - began,
        "host_loop_ms": [host_loop() for _ in range(10)],
        "loads": {},
    }
    for count in options.sequences or [len(data["input_ids"])]:
        found["loads"][count] = load = {}
        for part in measured(engine, data.slice(0, count), options, count):
            load.update(part)
            write(found, options.out)
    engine.shutdown()
    ray.shutdown()


def measured(engine: Any, data: Any, options: argparse.Namespace, count: int) -> Iterator[Any]:
    """Measure rollouts of these prompts; yield each part of the result when it is known."""
    import ray

    (actor,) = engine.worker_group.workers
    rollouts = []
    for _ in range(options.repeats + 1):
        began = time.perf_counter()
        engine.prepare_for_generation()
        woken = time.perf_counter()
        engine.generate(data)
        generated = time.perf_counter()
        engine.finish_generation()
        rollouts.append(
            {
                "wake_up": woken - began,
                "generate": generated - woken,
                "sleep": time.perf_counter() - generated,
            }
        )
    yield {
        "rollouts": rollouts,
        "generate_median": statistics.median(each["generate"] for each in rollouts[1:] or rollouts),
    }
    engine.prepare_for_generation()
    yield {"steps": ray.get(actor.__ray_call__.remote(in_steps, data))}
    yield {"profile": a_step(ray.get(actor.__ray_call__.remote(profiled, data)))}
    if options.spy is not None:
        pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
        running = actor.__ray_call__.remote(lambda worker, data: worker.generate(data).size, data)
        time.sleep(1)
        stacks = (options.out or Path("rollout.json")).with_suffix(f".{count}.stacks")
        command = [str(options.spy), "record", "--pid", str(pid), "--duration", str(SPY_SECONDS)]
        command += ["--rate", "100", "--idle", "--subprocesses", "--nonblocking"]
        command += ["--format", "raw", "--output", str(stacks)]
        subprocess.run(command, check=False)
        ray.get(running)
    engine.finish_generation()


def parse_counts(text: str) -> list[int]:
    """The numbers of ``--sequences``."""
    return [int(part) for part in text.split(",")]


def write(found: dict[str, Any], out: Path | None) -> None:
    """Print what was found; write it to ``out`` too."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

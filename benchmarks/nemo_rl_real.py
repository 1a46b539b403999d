"""A model of real size for ``nemo_rl.py --task real``: its data, its YAML, a table of phases."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from real_model import ANSWERS, prompt_words

from fp8rl.models.sizes import Sizes
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import KVDtype

TOKENS_IN, TOKENS_OUT = 512, 1024
WARM_STEPS = 2
"""Steps before those whose median is given."""
MEDIAN_STEPS = 3
"""Steps that a median needs at least."""
MICRO_BATCH = {"1.7b": (8, 8), "4b": (8, 8), "8b": (8, 4), "30b-a3b-12l": (4, 8)}
"""Sequences of a training micro-batch on one H200, and on each of several, which share the
optimizer's state (by count, not run). They are as many as have room, since in small ones the GPU
waits for the host."""
TIGHT = ("8b", "30b-a3b-12l")
"""Sizes for which one GPU is tight: activations are computed again in the backward pass (without
that 8B has room for micro-batches of two there), and the optimizer takes 10 bytes a parameter for
12."""
LOGPROB_BATCH = {"1.7b": 16, "4b": 16, "8b": 8, "30b-a3b-12l": 8}
"""Sequences of a micro-batch of log-probabilities. No activations are kept there, but Megatron
copies the logits once, which takes 5 GB for eight sequences."""
LOGPROB_CHUNK = 256
"""Tokens of a sequence whose logits are in float32 at once."""
BATCHED_TOKENS = 8192
"""Of vLLM's steps that compute prompts."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
"""All answers are equally long, so nearly all steps have all sequences."""
LEARNING_RATE = 1e-6
KV_BLOCK = 16
"""Tokens of a block of vLLM's KV cache."""
CACHE_SLACK = 1.02
CACHES: dict[str, KVDtype] = {
    "upstream": "fp8_e4m3",
    "fp8rl": "fp8_e4m3",
    "fp8rl-int8kv": "int8_per_token_head",
    "fp8rl-exact": "fp8_e4m3",
}
"""KV caches of the variants; the others have one in BF16."""
IDLE_MIB, IDLE_LOAD = 1024, 0.25
"""Memory in use of a GPU, and processes that want to run for each core, of a machine that does
nothing else."""
PHASES = {
    "rollout": ("generation",),
    "log-probabilities": ("policy_and_reference_logprobs",),
    "training": ("policy_training",),
    "weights to vLLM": ("prepare_for_generation/transfer_and_update_weights",),
    "KV scales by the trainer": ("recompute_kv_scales",),
    "sleep, wake-up, moves to and from the host": (
        "prepare_for_generation/total",
        "logprob_inference_prep",
        "training_prep",
    ),
    "reward, advantages, batches": (
        "data_processing",
        "reward_calculation",
        "advantage_calculation",
    ),
}
"""Timers of NeMo RL, which are added up. The wake-up's contains the transfer of weights, which is
taken off."""
STEP = "total_step_time"


def make_data(file: Path, shape: Mapping[str, Any], count: int) -> Path:
    """Write prompts of exactly TOKENS_IN tokens, each with one of the answers.

    Args:
        file: to write.
        shape: the model's ``config.json``.
        count: number of prompts.
    """
    chosen, coin = prompt_words(shape), random.Random("real size")
    with file.open("w", encoding="utf-8") as rows:
        for _ in range(count):
            prompt = " ".join(coin.choices(chosen, k=TOKENS_IN))
            rows.write(json.dumps({"input": prompt, "output": coin.choice(ANSWERS)}) + "\n")
    return file


def real_size(
    value: dict[str, Any], size: str, shape: Mapping[str, Any], variant: str, gpus: int
) -> None:
    """Change a YAML of the benchmark to a model of real size, in place.

    Args:
        value: the YAML.
        size: key of MICRO_BATCH.
        shape: the model's ``config.json``.
        variant: says what is in FP8.
        gpus: GPUs, each of which has an engine of its own and trains on its share, with its share
            of the experts.
    """
    grpo, policy = value["grpo"], value["policy"]
    sequences = grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
    policy |= {
        "max_total_sequence_length": TOKENS_IN + TOKENS_OUT,
        "train_global_batch_size": sequences,
        "train_micro_batch_size": micro_batch(size, gpus),
        "logprob_batch_size": LOGPROB_BATCH[size],
        # Whole float32 logits of 151,936 words would take half of a micro-batch's memory.
        "logprob_chunk_size": LOGPROB_CHUNK,
        # The optimizer stays on the GPU; elsewhere its way to the host and back takes seconds.
        "offload_optimizer_for_refit": False,
    }
    megatron = policy["megatron_cfg"]
    megatron["defer_fp32_logits"] = True
    tight = size in TIGHT and gpus == 1
    megatron["activation_checkpointing"] = tight
    if ModelSpec.of(shape).experts:
        megatron["expert_model_parallel_size"] = gpus
    megatron["optimizer"] |= {
        "lr": LEARNING_RATE,
        "min_lr": LEARNING_RATE,
        "use_precision_aware_optimizer": tight,
    }
    generation = policy["generation"]
    of_engine = sequences // gpus
    prompts = -(-grpo["num_prompts_per_step"] // gpus)
    generation |= {
        "max_new_tokens": TOKENS_OUT,
        # No answer ends early, whatever is sampled.
        "ignore_eos": True,
        "stop_token_ids": [],
        "vllm_kwargs": {
            "max_num_seqs": of_engine,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "kv_cache_memory_bytes": cache_bytes(
                shape, prompts, of_engine, CACHES.get(variant, "auto")
            ),
            "compilation_config": {
                "cudagraph_capture_sizes": [n for n in GRAPH_SIZES if n < of_engine] + [of_engine]
            },
        },
    }
    generation["vllm_cfg"] |= {
        "tensor_parallel_size": 1,
        "enforce_eager": False,
        "use_deep_gemm": variant == "upstream",
    }
    if "expert_model_parallel_size" in megatron and variant == "bf16":
        # As in upstream's file for Qwen3-30B-A3B: not all of vLLM's layouts of experts in BF16 can
        # be refitted.
        generation["vllm_kwargs"]["moe_backend"] = "triton"
    value["data"]["max_input_seq_length"] = TOKENS_IN + 1  # longer ones are cut
    value["env"]["math"]["verifier_type"] = "english_multichoice"


def micro_batch(size: str, gpus: int) -> int:
    """Return the sequences of a training micro-batch."""
    alone, shared = MICRO_BATCH[size]
    return alone if gpus == 1 else shared


def refusal(size: str, steps: int, sequences: int, gpus: int) -> str | None:
    """Say why a run would fail or would have no median; None if it has one.

    Args:
        size: key of MICRO_BATCH.
        steps: steps of the run.
        sequences: sequences of a step.
        gpus: GPUs of the run.
    """
    least = WARM_STEPS + MEDIAN_STEPS
    share = math.lcm(micro_batch(size, gpus), LOGPROB_BATCH[size]) * gpus
    if steps < least:
        return f"--task real needs --steps {least} or more; its medians leave out {WARM_STEPS}"
    if sequences % share:
        return f"--task real needs a multiple of {share} sequences (--prompts x --generations)"
    return None


def cache_bytes(shape: Mapping[str, Any], prompts: int, sequences: int, dtype: KVDtype) -> int:
    """Return the bytes of a KV cache that holds all sequences at once.

    The samples of a prompt share its blocks but for the last one (prefix caching).

    Args:
        shape: the model's ``config.json``.
        prompts: different prompts.
        sequences: samples of all of them.
        dtype: of the cache.
    """
    token = Sizes(ModelSpec.of(shape), 1).kv_per_token(2, dtype)
    tokens = prompts * TOKENS_IN + sequences * (TOKENS_OUT + 2 * KV_BLOCK)
    return int(token * tokens * CACHE_SLACK)


def is_shared(patience: float = 20) -> bool:
    """Tell whether others use a GPU or the cores of this machine: then seconds are upper bounds.

    Args:
        patience: seconds that the workers of an earlier run have to end.
    """
    until = time.monotonic() + patience
    while busy := _is_busy():
        if time.monotonic() > until:
            break
        time.sleep(1)
    return busy


def _is_busy() -> bool:
    running = int(Path("/proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[0])
    if running > 1 + IDLE_LOAD * (os.cpu_count() or 1):
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return any(float(used) > IDLE_MIB for used in told.split())


def is_complete(run: Mapping[str, Any]) -> bool:
    """Tell whether a run has the steps of a median."""
    return run.get("steps", 0) >= WARM_STEPS + MEDIAN_STEPS


def phases(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the median seconds of each of PHASES, of the rest, and of the whole step."""
    seconds = {name: told.get("median", 0.0) for name, told in run["seconds"].items()}
    found = {
        phase: sum(seconds.get(name, 0.0) for name in names) for phase, names in PHASES.items()
    }
    found["sleep, wake-up, moves to and from the host"] -= found["weights to vLLM"]
    found["rest"] = seconds[STEP] - sum(found.values())
    return found | {"whole step": seconds[STEP]}


def table(runs: Sequence[Mapping[str, Any]], variants: Sequence[str]) -> str:
    """Return a table in Markdown: seconds by phase, their share of the first run's, and ratios.

    Args:
        runs: results, the first of which is BF16.
        variants: name of each.
    """
    columns = {
        variant: phases(run)
        for variant, run in zip(variants, runs, strict=True)
        if is_complete(run)
    }
    if not columns:
        return "No run has the steps of a median."
    (first, base), *others = columns.items()
    heads = [f"| median seconds | {first} | share |", *(f" {name} |" for name, _ in others)]
    lines = ["".join(heads), "|" + " --- |" * (3 + len(others))]
    for phase, seconds in base.items():
        share = f"{seconds / base['whole step']:.0%}"
        row = f"| {phase} | {seconds:.2f} | {share} |"
        for _, found in others:
            ratio = f" ({seconds / found[phase]:.2f}x)" if found[phase] and seconds else ""
            row += f" {found[phase]:.2f}{ratio} |"
        lines.append(row)
    bounds = [variant for variant, run in zip(variants, runs, strict=True) if run["upper_bounds"]]
    if bounds:
        lines += ["", f"Upper bounds, since others used the machine: {', '.join(bounds)}."]
    for variant, run in zip(variants, runs, strict=True):
        if run.get("set"):
            lines += ["", f"{variant} was run with --set {' --set '.join(run['set'])}."]
    return "\n".join(lines)

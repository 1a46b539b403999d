"""NeMo RL's own ``run_grpo.py``: BF16, upstream's FP8, and fp8rl, on one seed.

    python benchmarks/nemo_rl.py --source NEMO_RL --folder OUT [--trainer dtensor|megatron]
                                 [--variants bf16,upstream,fp8rl] [--steps 20] [--gpus 1]
                                 [--single-controller | --in-flight] [--model HF_FOLDER]
                                 [--family FAMILY] [--prompts 32] [--generations 16]
                                 [--limit SECONDS] [--graphs] [--write-only]
                                 [--task sums|long|reasoning|real] [--programs 24,40]
                                 [--gym sums|legs] [--seed 42]
                                 [--size 1.7b|4b|8b|30b-a3b-12l] [--set KEY=VALUE]...

Makes a model and data, writes a YAML for each variant on top of upstream's (``nemo_rl_yaml.py``),
runs the driver untouched, and prints for each variant what its logs have (``nemo_rl_results.py``):
reward and mismatch of every step, and seconds by phase. ``fp8rl-bf16kv`` has a BF16 KV cache,
``fp8rl-int8kv`` an INT8 cache; ``fp8rl-rollout`` and ``upstream-rollout`` FP8 in rollouts alone,
over a BF16 cache; ``fp8rl-exact`` is ``exact: true``, for ``sums`` with packed sequences,
``fp8rl-exact-int8kv`` the same over an INT8 cache; ``fp8rl-pinned`` has q, k, v and the last layer
in BF16 over an INT8 cache. A DTensor trainer stays in BF16 with ``--set
policy.dtensor_cfg.fp8rl=null``.

``--task sums``: a small Qwen3 trained here for seconds, or a small model of ``--family`` with its
file under ``recipes/`` (``nemo_rl_families.py``). ``--gpus 2`` makes rollouts tensor-parallel and
training data-parallel. ``--single-controller`` and ``--in-flight`` put the Megatron trainer on one
of two GPUs and an asynchronous engine on the other; ``fp8rl`` then has KV scales that grow.
``--task long``: answers of hundreds of tokens (``long_tasks.py``; ``--programs`` bounds the steps
of a program) of the model that ``long_model.py`` has made. It validates and keeps checkpoints; the
same command goes on from the last one.
``--task reasoning``: a task of reasoning-gym (``--gym``, ``reasoning_tasks.py``), which its scorer
judges, of the pretrained model that ``reasoning_model.py`` has warmed up; it goes on likewise.
reasoning-gym must be importable here and in Ray's workers.
``--task real``: a Qwen3 of true shape with random weights (``real_model.py``), 512 tokens in and
exactly 1,024 out. Medians leave out two steps, a table of them is written to
``FOLDER/real-SIZE.md``, and a variant whose result lies in the folder is not run again.

``--limit`` ends a variant's driver after so many seconds, and prints the steps it has made (its
exit is then null). ``--graphs`` lets vLLM capture CUDA graphs; each ``--set`` is an override that
the driver is given. On one machine without NeMo RL's own virtual environments set
``NEMO_RL_PY_EXECUTABLES_SYSTEM=1`` and start Ray first (``RAY_prestart_worker_first_driver=0 ray
start --head --include-dashboard=false``; without the variable Ray starts a process for each core,
none of which is used).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import yaml
from long_tasks import bounds
from nemo_rl_data import PROBLEMS, prepare
from nemo_rl_families import RECIPES, gate
from nemo_rl_results import MEDIAN_STEPS, WARM_STEPS, is_complete, judge_of, summary, table
from nemo_rl_yaml import LOGPROB_BATCH, batch_size, config, micro_batch
from processes import is_shared
from real_model import SIZES, has_shape
from reasoning_tasks import TASKS as REASONING

VARIANTS = (
    "bf16",
    "upstream",
    "upstream-rollout",
    "fp8rl",
    "fp8rl-bf16kv",
    "fp8rl-int8kv",
    "fp8rl-rollout",
    "fp8rl-exact",
    "fp8rl-exact-int8kv",
    "fp8rl-pinned",
)
TASKS: dict[str, dict[str, Any]] = {
    "sums": {"variants": "bf16,upstream,fp8rl", "steps": 20, "prompts": 32, "generations": 16},
    "long": {
        "trainer": "megatron",
        "variants": "bf16,fp8rl-rollout,fp8rl-bf16kv,fp8rl,upstream",
        "steps": 100,
        "prompts": 16,
        "generations": 8,
        "programs": (24, 40),
    },
    "reasoning": {
        "trainer": "megatron",
        "variants": "bf16,fp8rl-rollout,fp8rl-bf16kv,fp8rl,fp8rl-int8kv,fp8rl-exact,"
        "fp8rl-exact-int8kv,fp8rl-pinned",
        "steps": 100,
        "prompts": 16,
        "generations": 8,
        "gym": "sums",
    },
    "real": {
        "trainer": "megatron",
        "variants": "bf16,fp8rl,upstream",
        "steps": 5,
        "prompts": 16,
        "generations": 16,
        "size": "4b",
    },
}
"""Defaults of the other arguments."""
PROGRESS = re.compile(r"Step \d+/\d+|Total step time: [0-9.]+s|Total setup: [0-9.]+s")
"""Of the driver's log, what is shown while it runs."""
RESUMED = ("long", "reasoning")
"""Tasks that validate, keep checkpoints and go on from the last one."""
WORKERS = Path(__file__).resolve().with_name("nemo_rl_workers")
"""What Ray's workers import, in a folder without a ``nemo_rl.py``."""


def parse() -> argparse.Namespace:
    """Read the arguments; ``variants`` is a list then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trainer", choices=("dtensor", "megatron"), default="dtensor")
    parser.add_argument("--variants")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--gpus", type=int, default=1)
    loops = parser.add_mutually_exclusive_group()
    loops.add_argument("--single-controller", action="store_true")
    loops.add_argument("--in-flight", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--family", choices=tuple(RECIPES))
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--generations", type=int)
    parser.add_argument("--task", choices=tuple(TASKS), default="sums")
    parser.add_argument("--programs", type=bounds, metavar="SHORTEST,LONGEST")
    parser.add_argument("--gym", choices=tuple(REASONING))
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--limit", type=float)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--write-only", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.set_defaults(**TASKS[parser.parse_known_args()[0].task])
    options = parser.parse_args()
    options.variants = options.variants.split(",")
    if found := refusal(options):
        parser.error(found)
    return options


def main() -> int:
    options = parse()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    real = options.task == "real"
    kept = kept_results(options, folder) if real and not options.write_only else {}
    model, data = prepare(options, folder)
    runs, failed = [], False
    for variant in options.variants:
        if variant in kept:
            runs.append(kept[variant])
            continue
        logs = folder / f"logs-{run_name(options, variant)}"
        file = folder / f"{run_name(options, variant)}.yaml"
        value = config(options, model, data, logs, variant)
        file.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
        if options.write_only:
            continue
        runs.append(run_variant(options, file, logs))
        failed |= runs[-1]["exit"] != 0
        sys.stdout.write(json.dumps(runs[-1]) + "\n")
        if real and is_complete(runs[-1]):
            file.with_suffix(".json").write_text(json.dumps(runs[-1]), encoding="utf-8")
    if real and runs:
        text = table(runs, options.variants)
        (folder / f"real-{options.size}.md").write_text(text + "\n", encoding="utf-8")
        sys.stderr.write(text + "\n")
    return int(failed)


def kept_results(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the results of variants that an earlier run of this command has completed.

    Raises:
        SystemExit: one is of another number of sequences.
    """
    sequences = options.prompts * options.generations
    found = {}
    for variant in options.variants:
        file = folder / f"{run_name(options, variant)}.json"
        if not file.is_file():
            continue
        found[variant] = json.loads(file.read_text(encoding="utf-8"))
        if found[variant].get("sequences", sequences) != sequences:
            raise SystemExit(f"{file} is of another number of sequences; move it away")
    return found


def run_variant(options: argparse.Namespace, file: Path, logs: Path) -> dict[str, Any]:
    """Run the driver with one variant's YAML and return what its logs tell.

    Args:
        options: of the benchmark.
        file: the YAML; the driver's output goes beside it.
        logs: folder of its tensorboard.
    """
    resumed, real = options.task in RESUMED, options.task == "real"
    driver = "run_grpo_single_controller.py" if options.single_controller else "run_grpo.py"
    shared = is_shared() if real else None
    earlier = set(logs.glob("*"))
    command = [sys.executable, str(options.source.resolve() / "examples" / driver)]
    if options.task == "reasoning":
        command.insert(1, str(WORKERS / "reasoning_environment.py"))
    with file.with_suffix(".log").open("a" if resumed else "w", encoding="utf-8") as log:
        arguments = ["--config", str(file), *options.set]
        code = run([*command, *arguments], options.source, log, options.limit)
    warm = WARM_STEPS if real else 1
    # What an earlier run has logged is no result of one that ended before it logged anything.
    logged = logs.is_dir() and (resumed or set(logs.glob("*")) > earlier)
    found = {}
    if logged:
        judge = judge_of(options.task, options.model) if resumed else None
        found = summary(logs, Path(log.name), judge, warm)
    if options.family and found:
        found["gate"] = gate(options.family, found["curves"])
    if real:
        sequences = options.prompts * options.generations
        found |= {"upper_bounds": shared, "sequences": sequences, "set": options.set}
    return {"run": file.stem, "exit": code, **found}


def run(command: list[str], source: Path, log: TextIO, limit: float | None) -> int | None:
    """The driver's exit code; None where it was ended after ``limit`` seconds.

    The lines of its log that are :data:`PROGRESS` go to stderr as they come.
    """
    start = Path(log.name).stat().st_size
    process = subprocess.Popen(
        command,
        # Ray's workers import from the driver's directory, and benchmarks/ has a nemo_rl.py.
        cwd=Path(log.name).parent,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "NEMO_RL_CONFIGS": str(source.resolve() / "examples" / "configs"),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(WORKERS), os.environ.get("PYTHONPATH")))
            ),
        },
    )
    began = time.monotonic()
    try:
        with Path(log.name).open(encoding="utf-8", errors="replace") as lines:
            lines.seek(start)
            rest = ""
            while True:
                code = process.poll()
                whole, _, rest = (rest + lines.read()).rpartition("\n")
                for found in PROGRESS.findall(whole):
                    sys.stderr.write(f"{time.monotonic() - began:6.0f} s: {found}\n")
                if code is not None:
                    return code
                if limit is not None and time.monotonic() - began > limit:
                    return None
                time.sleep(0.2)
    finally:  # also where this is interrupted
        process.kill()
        process.wait()


def run_name(options: argparse.Namespace, variant: str) -> str:
    """Return the name of a variant's run, which its files have."""
    name = f"{options.trainer}-{variant}" + (f"-{options.gpus}" if options.gpus > 1 else "")
    name += "-single-controller" if options.single_controller else ""
    name += "-in-flight" if options.in_flight else ""
    name += f"-{options.family}" if options.family else ""
    name += f"-long-{options.seed}" if options.task == "long" else ""
    name += f"-{options.gym}-{options.seed}" if options.task == "reasoning" else ""
    return name + (f"-{options.size}" if options.task == "real" else "")


def refusal(options: argparse.Namespace) -> str | None:
    """Say why options cannot be run together; None if they can."""
    variants = options.variants
    task, sequences = options.task, options.prompts * options.generations
    megatron = options.trainer == "megatron"
    if unknown := sorted(set(variants) - set(VARIANTS)):
        return f"--variants: {', '.join(unknown)}; there are {', '.join(VARIANTS)}"
    if min(options.steps, options.prompts, options.generations) < 1:
        return "--steps, --prompts and --generations must be 1 or more"
    if options.gpus < 1 or batch_size(options) % options.gpus:
        return f"--gpus {options.gpus} does not divide {batch_size(options)} sequences"
    if options.family and (not megatron or options.gpus > 1):
        return "--family needs --trainer megatron and one GPU"
    if options.family == "moonlight" and "upstream" in variants:
        # Megatron-LM puts a norm in front of its linear_q_proj for which Megatron-Bridge has no
        # weight (its issue 5261), and no key of NeMo RL's changes that; fp8rl's worker does.
        return "--family moonlight has no --variants upstream: its worker cannot import the model"
    exact = any(variant.startswith("fp8rl-exact") for variant in variants)
    if exact and (not megatron or options.gpus > 1 or options.family):
        return "--variants fp8rl-exact needs --trainer megatron and one GPU, and has no --family"
    if "upstream-rollout" in variants and not megatron:
        return "--variants upstream-rollout needs --trainer megatron; else it is upstream"
    if options.single_controller or options.in_flight:
        loop = "--single-controller" if options.single_controller else "--in-flight"
        if not megatron or options.gpus != 2:
            return f"{loop} needs --trainer megatron --gpus 2"
        if task != "sums":
            return f"{loop} has no --task {task}"
    for name, of_task in (("size", "real"), ("programs", "long"), ("gym", "reasoning")):
        if task != of_task and getattr(options, name) is not None:
            return f"--{name} is for --task {of_task}"
    if task in RESUMED:
        if options.model is None or options.family:
            return f"--task {task} needs --model and has no --family"
        if options.steps * options.prompts > PROBLEMS:
            return f"--task {task} has {PROBLEMS} problems, fewer than --steps x --prompts"
    if task == "real":
        if not megatron or options.family:
            return "--task real needs --trainer megatron and has no --family"
        if options.model is not None and not has_shape(options.model, options.size):
            return f"{options.model} is no model of real_model.py --size {options.size}"
        return real_refusal(options.size, options.steps, sequences, options.gpus)
    return None


def real_refusal(size: str, steps: int, sequences: int, gpus: int) -> str | None:
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


if __name__ == "__main__":
    raise SystemExit(main())

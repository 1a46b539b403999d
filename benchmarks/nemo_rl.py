"""NeMo RL's own ``run_grpo.py``: BF16, upstream's FP8, and fp8rl, on one seed.

    python benchmarks/nemo_rl.py --source NEMO_RL --folder OUT [--trainer dtensor|megatron]
                                 [--variants bf16,upstream,fp8rl] [--steps 20] [--gpus 1]
                                 [--single-controller | --in-flight] [--model HF_FOLDER]
                                 [--family FAMILY] [--prompts 32] [--generations 16]
                                 [--limit SECONDS] [--graphs] [--write-only] [--curves FILE.svg]
                                 [--task sums|long|real] [--programs 24,40] [--seed 42]
                                 [--size 1.7b|4b|8b|30b-a3b-12l]
                                 [--set KEY=VALUE]...

Trains a small Qwen3 for seconds (``sums_model.py``; or takes ``--model``), writes sums as JSONL and
a YAML for each variant on top of upstream's ``grpo_math_1B.yaml``, runs the driver untouched, and
prints for each variant what its tensorboard has: the reward and the mismatch of every step, and the
seconds by phase, with those of vLLM's own calibrations, which are part of ``generation``, from the
log, and those before the first step. ``fp8rl-bf16kv`` is a fourth variant, with FP8 rollouts over a
BF16 KV cache, as upstream's FP8 path has it with a DTensor trainer; ``fp8rl-int8kv`` has an INT8
cache; ``fp8rl-exact`` is ``exact: true`` with the Megatron trainer, for ``sums`` with packed
sequences.
``--gpus 2`` makes rollouts
tensor-parallel and training data-parallel over two GPUs. ``--single-controller`` runs
``run_grpo_single_controller.py`` instead, with its YAML: the Megatron trainer on one of two GPUs,
an asynchronous engine on the other, one optimizer step for all sequences of a step. ``--in-flight``
runs asynchronous GRPO on two GPUs in the same way, whose requests go on across refits. With either
``fp8rl`` has KV scales that grow (``kv_cache.recalibrate``).
``--family`` takes a small model of another architecture (``tiny_models.py``) and its file under
``recipes/`` in the place of ``grpo_math_1B.yaml``, cut down to one GPU: ``fp8rl`` is the recipe,
``upstream`` the file of NeMo RL beneath it, and ``bf16`` that without FP8. Printed with the curves
is whether the mismatch over all steps keeps the bound of upstream's test of that file
(``tests/test_suites/`` of NeMo RL), which also has bounds for single steps.
``--task long`` asks for answers of hundreds of tokens (``long_tasks.py``; ``--programs`` bounds the
steps of a program) of the model that ``long_model.py`` has made (``--model``), for 100 steps of 16
prompts x 8 samples, in five variants: ``fp8rl-rollout`` is FP8 in rollouts alone. It validates and
keeps checkpoints; the same command goes on from the last one. Printed beside the curves, which then
are those of all parts of the run, are the validations, the mismatch by position and by what a token
is in an answer, the tokens that make most of it, and what goes wrong first in answers that are not
right.
``--task real`` takes a Qwen3 of true shape with random weights (``real_model.py``; ``--size``) for
five steps of 16 prompts x 16 samples, 512 tokens in and exactly 1,024 out, with the Megatron
trainer and CUDA graphs; with ``--gpus 2`` each GPU has an engine of its own. Its medians leave out
two steps, and a table of them is written to ``FOLDER/real-SIZE.md``. A variant whose result lies in
the folder is not run again.
``--limit`` ends a variant's driver after so many seconds, and prints the steps it has made (its
exit is then null). ``--graphs`` lets vLLM capture CUDA graphs; ``--write-only`` stops before the
driver; ``--curves`` draws the variants (``nemo_rl_curves.py``); each ``--set`` is an override that
the driver is given. On one machine without NeMo RL's own virtual environments set
``NEMO_RL_PY_EXECUTABLES_SYSTEM=1`` and start Ray first (``RAY_prestart_worker_first_driver=0 ray
start --head --include-dashboard=false``; without the variable Ray starts a process for each core,
none of which is used).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from long_tasks import bounds
from nemo_rl_curves import draw
from nemo_rl_long import PROBLEMS, long_answers, read_steps, step_files
from nemo_rl_long import make_data as make_long_data
from nemo_rl_real import CACHES, WARM_STEPS, is_complete, is_shared, real_size, table
from nemo_rl_real import make_data as make_real_data
from nemo_rl_real import refusal as real_refusal
from real_model import SIZES, has_shape, shape_of
from real_model import make_model as make_real_model
from sums_model import make_model, problems
from tiny_models import FAMILIES

VARIANTS = (
    "bf16",
    "upstream",
    "fp8rl",
    "fp8rl-bf16kv",
    "fp8rl-int8kv",
    "fp8rl-rollout",
    "fp8rl-exact",
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
CURVES = (
    "train/reward",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/approx_entropy",
    "train/mean_gen_tokens_per_sample",
    "train/fp8rl/is_weight_ess",
    "train/fp8rl/token_mult_prob_error",
    "train/fp8rl/equal_logprobs",
    "train/fp8rl/guard_level",
    "train/fp8rl/step_skipped",
)
"""Printed step by step."""
VALIDATION = ("accuracy", "avg_length")
SECONDS = (
    "generation",
    "policy_and_reference_logprobs",
    "policy_training",
    "data_processing",
    "reward_calculation",
    "advantage_calculation",
    "logprob_inference_prep",
    "training_prep",
    "exposed_generation",
    "weight_sync",
    "recompute_kv_scales",
    "prepare_for_generation/total",
    "prepare_for_generation/transfer_and_update_weights",
    "total_step_time",
)
"""Phases (``timing/train/...``); printed are the first step, which warms up, and the median of the
others."""
SETUP = re.compile(r"^ +(Generation init|Policy init|Total setup): ([0-9.]+)s", re.MULTILINE)
"""Lines of the driver's."""
PROGRESS = re.compile(r"Step \d+/\d+|Total step time: [0-9.]+s|Total setup: [0-9.]+s")
"""Of the driver's log, what is shown while it runs."""
BATCH = 128
"""Sequences of an optimizer step, in one micro-batch on each GPU."""
CALIBRATION = re.compile(r"KV scales calibrated from .* in ([0-9.]+) s:")
"""A line of ``nemo_rl_ext.workers.self_calibration``."""
LEARNING_RATE = 4e-5
WARMUP_STEPS = 5


RECIPES = {
    "llama": "llama3.1-8b-fp8-2n8g.yaml",
    "qwen3": "qwen3-8b-fp8-kv-1n8g.yaml",
    "qwen3_moe": "qwen3-30b-a3b-fp8-8n8g.yaml",
    "moonlight": "moonlight-16b-fp8-4n8g.yaml",
    "deepseek_v3": "deepseek-v3-fp8-async-64n8g.yaml",
    "qwen3_5": "qwen3.5-9b-fp8-1n8g.yaml",
    "qwen3_5_moe": "qwen3.5-35b-a3b-fp8-2n8g.yaml",
    "minimax_m2": "minimax-m2.7-fp8-rollouts-8n8g.yaml",
}
"""File under ``recipes/`` of each family."""
GATES: dict[str, tuple[str, str, float]] = {
    "llama": ("train/token_mult_prob_error", "median", 1.1),
    "qwen3": ("train/token_mult_prob_error", "median", 2.0),
    "qwen3_moe": ("train/token_mult_prob_error", "median", 1.1),
    "moonlight": ("train/token_mult_prob_error", "median", 1.1),
    "deepseek_v3": ("train/token_mult_prob_error", "median", 1.1),
    "qwen3_5": ("train/gen_kl_error", "mean", 0.003),
    "qwen3_5_moe": ("train/gen_kl_error", "mean", 0.004),
    "minimax_m2": ("train/gen_kl_error", "mean", 0.01),
}
"""The curve that upstream's test of the recipe bounds over all steps, how, and the bound."""
RECIPE_FOLDER = Path(__file__).resolve().parents[1] / "recipes"


def make_data(file: Path) -> Path:
    """The sums that the model was trained on, once each, with the right answer."""
    rows = (json.dumps({"input": p.prompt, "output": p.answer}) for p in problems())
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def config(
    options: argparse.Namespace, model: Path, data: Path, logs: Path, variant: str
) -> dict[str, Any]:
    """One variant's YAML; FP8 training and upstream's FP8 KV cache where Megatron trains."""
    source, megatron = options.source.resolve(), options.trainer == "megatron"
    batch = batch_size(options)
    vllm: dict[str, Any] = {
        "tensor_parallel_size": options.gpus,
        "enforce_eager": not options.graphs,
        "gpu_memory_utilization": 0.3,
        "use_tqdm": False,
    }
    value: dict[str, Any] = {
        "defaults": [str(source / "examples" / "configs" / "grpo_math_1B.yaml")],
        "grpo": {
            "num_prompts_per_step": options.prompts,
            "num_generations_per_prompt": options.generations,
            "max_num_steps": options.steps,
            "val_period": 0,
            "val_at_start": False,
            "seed": options.seed,
        },
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "train_global_batch_size": batch,
            "train_micro_batch_size": batch // options.gpus,
            "sequence_packing": {"enabled": False},
            "dtensor_cfg": {"enabled": not megatron, "_v2": False},
            "optimizer": {"kwargs": {"lr": LEARNING_RATE}},
            "scheduler": [
                {
                    "name": "torch.optim.lr_scheduler.LinearLR",
                    "kwargs": {"start_factor": 0.2, "total_iters": WARMUP_STEPS},
                },
                {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}},
                {"milestones": [WARMUP_STEPS]},
            ],
            "megatron_cfg": {
                "enabled": megatron,
                "optimizer": {
                    "lr": LEARNING_RATE,
                    "min_lr": LEARNING_RATE,
                    "use_precision_aware_optimizer": False,  # as in upstream's FP8 recipes
                },
                "scheduler": {"lr_warmup_iters": WARMUP_STEPS},
            },
            "generation": {"vllm_cfg": vllm},
        },
        "loss_fn": {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_type": "tis",
            "truncated_importance_sampling_ratio": 2.0,
        },
        "data": {
            "max_input_seq_length": 32,
            "num_workers": 0,
            "train": {
                "_override_": True,
                "dataset_name": "ResponseDataset",
                "data_path": str(data),
                "input_key": "input",
                "output_key": "output",
            },
            "validation": None,
            "default": {"prompt_file": None, "system_prompt_file": None},
        },
        "env": {"math": {"num_workers": 2}},  # each imports torch while vLLM starts
        "checkpointing": {"enabled": False},
        "logger": {
            "log_dir": str(logs),
            "wandb_enabled": False,
            "mlflow_enabled": False,
            "swanlab_enabled": False,
            "tensorboard_enabled": True,
            "monitor_gpus": False,
        },
        "cluster": {"gpus_per_node": options.gpus, "num_nodes": 1},
    }
    if options.family:
        cut_down(value, options.family, variant)
        return value
    if variant == "upstream":
        vllm |= {"precision": "fp8", "kv_cache_dtype": "fp8" if megatron else "auto"}
        value["policy"]["megatron_cfg"] |= {
            "fp8_cfg": {"enabled": megatron},
            "env_vars": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        }
    if variant.startswith("fp8rl"):
        value["defaults"].append(str(RECIPE_FOLDER / "keys.yaml"))
        value["fp8rl"] = {
            "training": megatron and variant != "fp8rl-rollout",
            "kv_cache": {"dtype": CACHES.get(variant, "auto")},
            "pins": {"layers": [1]} if megatron else {},
        }
    if variant == "fp8rl-exact":
        value["fp8rl"] |= {"exact": True, "pins": {}}
        value["policy"]["logprob_chunk_size"] = 1024
        value["policy"]["megatron_cfg"]["defer_fp32_logits"] = True
        # The other tasks compare variants, so that all make their batches alike.
        value["policy"]["sequence_packing"]["enabled"] = options.task == "sums"
    if options.single_controller:
        single_controller(value, source, options)
    if options.in_flight:
        value["grpo"]["async_grpo"] = {"enabled": True, "in_flight_weight_updates": True}
    if options.single_controller or options.in_flight:
        if variant == "fp8rl":
            value["fp8rl"]["kv_cache"]["recalibrate"] = "grow"
        generation = value["policy"]["generation"]
        generation["colocated"] = {"enabled": False, "resources": {"gpus_per_node": 1}}
        generation["vllm_cfg"] |= {"tensor_parallel_size": 1, "async_engine": True}
    if options.task != "sums":
        value["grpo"]["skip_reference_policy_logprobs_calculation"] = True
        value["loss_fn"]["reference_policy_kl_penalty"] = 0
        if "fp8rl" in value:
            value["fp8rl"]["pins"] = {}  # upstream's FP8 has none either
    if options.task == "long":
        checkpoints = logs.with_name(logs.name.replace("logs", "checkpoints", 1))
        long_answers(value, options.programs[1], data, checkpoints)
    if options.task == "real":
        real_size(value, options.size, shape_of(options.size), variant, options.gpus)
    return value


def batch_size(options: argparse.Namespace) -> int:
    """Sequences of an optimizer step: BATCH, or all of a step that has fewer."""
    return min(BATCH, options.prompts * options.generations)


def cut_down(value: dict[str, Any], family: str, variant: str) -> None:
    """Put a YAML on top of the family's recipe, in place, for a small model on one GPU.

    What the recipe says of precisions, pins, loss, router and recomputation stays. What is taken
    back is parallel and asynchronous, or made for long answers.
    """
    file = RECIPE_FOLDER / RECIPES[family]
    upstream = yaml.safe_load(file.read_text(encoding="utf-8"))["defaults"][0]
    value["defaults"] = [str(file) if variant.startswith("fp8rl") else upstream]
    if variant in ("fp8rl-bf16kv", "fp8rl-int8kv"):
        value["fp8rl"] = {"kv_cache": {"dtype": CACHES.get(variant, "auto")}}
    value["grpo"] |= {
        "async_grpo": {"enabled": False, "in_flight_weight_updates": False},
        "use_dynamic_sampling": False,
        "batch_multiplier": 1,
        "reward_scaling": {"enabled": False},
        "reward_shaping": {"enabled": False},
    }
    policy = value["policy"]
    del value["loss_fn"], policy["optimizer"], policy["scheduler"]  # the latter are DTensor's
    policy |= {
        "tokenizer": {"name": policy["model_name"]},
        "logprob_batch_size": policy["train_micro_batch_size"],
        "logprob_chunk_size": None,
        "offload_optimizer_for_logprob": False,
        "dynamic_batching": {"enabled": False},
    }
    policy["megatron_cfg"] |= {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "sequence_parallel": False,
        # Refits share memory of the GPU between processes, which not every host allows with this.
        "env_vars": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
    }
    generation = policy["generation"]
    generation["max_new_tokens"] = policy["max_total_sequence_length"]
    generation["colocated"] = {
        "enabled": True,
        "resources": {"gpus_per_node": None, "num_nodes": None},
    }
    generation["vllm_cfg"] |= {
        "expert_parallel_size": 1,
        "enable_expert_parallel": False,
        "async_engine": False,
        "max_model_len": policy["max_total_sequence_length"],
    }
    generation["vllm_kwargs"] = {"speculative_config": None}  # the small models have no drafter
    if variant == "bf16":
        generation["vllm_cfg"] |= {"precision": "bfloat16", "kv_cache_dtype": "auto"}
        policy["megatron_cfg"]["fp8_cfg"] = {"enabled": False}
        # As in upstream's files in BF16: not all of vLLM's layouts of experts can be refitted.
        generation["vllm_kwargs"]["moe_backend"] = "triton"
    if FAMILIES[family].vision:
        generation["vllm_kwargs"]["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    if family == "moonlight" and variant == "bf16":
        # Upstream's worker cannot import it: see `refusal`. Ours can, and does nothing else here.
        policy["megatron_cfg"]["fp8rl"] = {"training": False}
    if family == "deepseek_v3":
        # Upstream's file has loss_fn.force_on_policy_ratio, which takes one optimizer step a step.
        grpo = value["grpo"]
        policy["train_global_batch_size"] = (
            grpo["num_prompts_per_step"] * grpo["num_generations_per_prompt"]
        )
    if family == "minimax_m2":
        # Upstream's file has the integer 0, which transformers 5.8 refuses.
        policy["hf_config_overrides"] = {"router_aux_loss_coef": 0.0}
    value["env"]["math"]["math_verify_impl"] = "hf_math_verify"


def single_controller(value: dict[str, Any], source: Path, options: argparse.Namespace) -> None:
    """Change a YAML to the single controller's, in place."""
    sequences = options.prompts * options.generations
    name = "grpo_math_1B_megatron_single_controller.yaml"
    value["defaults"][0] = str(source / "examples" / "configs" / name)
    value["policy"] |= {
        "train_global_batch_size": sequences,
        # A step comes in pieces of whole prompts, as their rollouts become ready.
        "train_micro_batch_size": options.generations,
        "logprob_batch_size": options.generations,
    }
    value["async_rl"] = {"min_groups_for_streaming_train": options.prompts // 2}
    value["data_plane"] = {"enabled": True, "storage_capacity": 8 * sequences}


def summary(logs: Path, log: Path, resumed: bool, warm: int = 1) -> dict[str, Any]:
    """``steps``, each of CURVES, ``seconds`` and ``setup``, from the run's tensorboard and log.

    Medians leave out ``warm`` steps.

    A run that can be ``resumed`` consists of all runs of the folder, and has ``validation``,
    ``positions``, ``kinds``, ``farthest`` and ``outcomes`` too.
    """
    folders = sorted(logs.glob("exp_*")) or [logs]  # NeMo RL makes a new one for each run
    found = scalars(folders if resumed else folders[-1:])
    values = {tag: list(by_step.values()) for tag, by_step in found.items()}
    seconds = {name: values.get(f"timing/train/{name}", []) for name in SECONDS}
    text = log.read_text(encoding="utf-8", errors="replace")
    seconds["engine_calibration"] = [float(taken) for taken in CALIBRATION.findall(text)]
    told = {
        "steps": len(values.get("train/reward", [])),
        "curves": {tag: [digits(x) for x in values[tag]] for tag in CURVES if tag in values},
        "seconds": {
            name: first_and_median(taken, warm) for name, taken in seconds.items() if taken
        },
        "setup": {name: float(taken) for name, taken in SETUP.findall(text)},
    }
    if resumed:
        validation = {name: found.get(f"validation/{name}", {}) for name in VALIDATION}
        told["validation"] = {"steps": list(validation["accuracy"])} | {
            name: [digits(x) for x in by_step.values()] for name, by_step in validation.items()
        }
        told |= read_steps(step_files(folders))
    return told


def digits(x: float) -> float:
    """Round to seven significant digits, as many as a float32 has: KL may be far below 1e-6."""
    return float(f"{x:.7g}")


def scalars(folders: Sequence[Path]) -> dict[str, dict[int, float]]:
    """Read the values of each tag in tensorboard's files, by step, in order.

    Args:
        folders: log folders of one run; later ones replace the steps that they have made again.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[str, dict[int, float]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("events.out.tfevents.*")):
            events = EventAccumulator(str(file))
            events.Reload()
            for tag in events.Tags()["scalars"]:
                found = {event.step: event.value for event in events.Scalars(tag)}
                values[tag] = values.get(tag, {}) | found
    return {tag: dict(sorted(by_step.items())) for tag, by_step in values.items()}


def gate(family: str, curves: dict[str, list[float]]) -> dict[str, Any]:
    """Compare a run's mismatch over all steps with the bound of upstream's test of the recipe."""
    curve, kind, bar = GATES[family]
    steps = curves.get(curve)
    if not steps:
        return {}
    found = {"mean": statistics.mean, "median": statistics.median}[kind](steps)
    return {"curve": curve, kind: round(found, 6), "bar": bar, "passed": found < bar}


def first_and_median(taken: list[float], warm: int = 1) -> dict[str, float]:
    """``first``, and ``median`` of what follows the first ``warm`` ones, if anything does."""
    told = {"first": round(taken[0], 3)}
    if len(taken) > warm:
        told["median"] = round(statistics.median(taken[warm:]), 3)
    return told


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
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--size", choices=tuple(SIZES))
    parser.add_argument("--limit", type=float)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--write-only", action="store_true")
    parser.add_argument("--curves", type=Path, metavar="FILE.svg")
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
    if options.curves is not None:
        draw(runs, options.curves)
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
    long, real = options.task == "long", options.task == "real"
    driver = "run_grpo_single_controller.py" if options.single_controller else "run_grpo.py"
    shared = is_shared() if real else None
    earlier = set(logs.glob("*"))
    command = [sys.executable, str(options.source.resolve() / "examples" / driver)]
    with file.with_suffix(".log").open("a" if long else "w", encoding="utf-8") as log:
        arguments = ["--config", str(file), *options.set]
        code = run([*command, *arguments], options.source, log, options.limit)
    warm = WARM_STEPS if real else 1
    # What an earlier run has logged is no result of one that ended before it logged anything.
    logged = logs.is_dir() and (long or set(logs.glob("*")) > earlier)
    found = summary(logs, Path(log.name), long, warm) if logged else {}
    if options.family and found:
        found["gate"] = gate(options.family, found["curves"])
    if real:
        sequences = options.prompts * options.generations
        found |= {"upper_bounds": shared, "sequences": sequences, "set": options.set}
    return {"run": file.stem, "exit": code, **found}


def run_name(options: argparse.Namespace, variant: str) -> str:
    """Return the name of a variant's run, which its files have."""
    name = f"{options.trainer}-{variant}" + (f"-{options.gpus}" if options.gpus > 1 else "")
    name += "-single-controller" if options.single_controller else ""
    name += "-in-flight" if options.in_flight else ""
    name += f"-{options.family}" if options.family else ""
    name += f"-long-{options.seed}" if options.task == "long" else ""
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
    if "fp8rl-exact" in variants and (not megatron or options.gpus > 1 or options.family):
        return "--variants fp8rl-exact needs --trainer megatron and one GPU, and has no --family"
    if "fp8rl-rollout" in variants and not megatron:
        return "--variants fp8rl-rollout needs --trainer megatron; else it is fp8rl-bf16kv"
    if options.single_controller or options.in_flight:
        loop = "--single-controller" if options.single_controller else "--in-flight"
        if not megatron or options.gpus != 2:
            return f"{loop} needs --trainer megatron --gpus 2"
        if task != "sums":
            return f"{loop} has no --task {task}"
    for name, of_task in (("size", "real"), ("programs", "long")):
        if task != of_task and getattr(options, name) is not None:
            return f"--{name} is for --task {of_task}"
    if task == "long":
        if options.model is None or options.family:
            return "--task long needs --model and has no --family"
        if options.steps * options.prompts > PROBLEMS:
            return f"--task long has {PROBLEMS} problems, fewer than --steps x --prompts"
    if task == "real":
        if not megatron or options.family:
            return "--task real needs --trainer megatron and has no --family"
        if options.model is not None and not has_shape(options.model, options.size):
            return f"{options.model} is no model of real_model.py --size {options.size}"
        return real_refusal(options.size, options.steps, sequences, options.gpus)
    return None


def prepare(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Return the folder of the model, made unless it is given, and the file of the data."""
    if options.task == "real":
        shape, model = shape_of(options.size), folder / f"model-{options.size}"
        if options.model is not None:
            model = options.model
        elif options.write_only:
            make_real_model(model, shape)
        else:  # in a process of its own, which leaves nothing on the GPU
            program = Path(__file__).with_name("real_model.py")
            command = [sys.executable, program, model, "--size", options.size]
            subprocess.run([str(part) for part in command], check=True)
        # Twice as many as needed: some are set apart for validation.
        count = 2 * options.steps * options.prompts
        return model.resolve(), make_real_data(folder / "prompts.jsonl", shape, count)
    model = options.model or make_model(folder / "model", options.family or "qwen3")
    if options.task == "long":
        return model.resolve(), make_long_data(folder, *options.programs)
    return model.resolve(), make_data(folder / "sums.jsonl")


if __name__ == "__main__":
    raise SystemExit(main())

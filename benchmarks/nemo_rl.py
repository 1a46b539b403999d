"""NeMo RL's own ``run_grpo.py`` on one GPU: BF16, upstream's FP8, and fp8rl, on one seed.

    python benchmarks/nemo_rl.py --source NEMO_RL --folder OUT [--trainer dtensor|megatron]
                                 [--variants bf16,upstream,fp8rl] [--steps 20] [--model HF_FOLDER]
                                 [--write-only]

Makes a small Qwen3 with a tokenizer of characters (or takes ``--model``), data of sums as JSONL and
a YAML for each variant on top of upstream's ``grpo_math_1B.yaml``, runs the driver untouched, and
prints for each variant what its tensorboard has of the reward, the mismatch and the seconds by
phase. ``--write-only`` stops before the driver. On one machine without NeMo RL's own virtual
environments set ``NEMO_RL_PY_EXECUTABLES_SYSTEM=1`` and start Ray first
(``ray start --head --include-dashboard=false``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

VARIANTS = ("bf16", "upstream", "fp8rl")
TAGS = (
    "train/reward",
    "train/token_mult_prob_error",
    "train/gen_kl_error",
    "train/fp8rl/is_weight_ess",
    "timing/train/generation",
    "timing/train/policy_training",
    "timing/train/recompute_kv_scales",
    "timing/train/prepare_for_generation/total",
    "timing/train/total_step_time",
)


def make_model(folder: Path) -> Path:
    """A random Qwen3 that reads characters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from vllm_fp8rl.testing.tiny import make_checkpoint

    make_checkpoint(folder, 0)
    special = ["<pad>", "<eos>", "<unk>"]
    words = [*special, *(chr(code) for code in range(32, 127))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return folder


def make_data(file: Path, rows: int = 512) -> Path:
    lines = (
        {"input": f"{i % 32}+{i // 32}=", "output": str(i % 32 + i // 32)} for i in range(rows)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def config(
    source: Path, model: Path, data: Path, logs: Path, variant: str, trainer: str, steps: int
) -> dict[str, Any]:
    """One variant's YAML; FP8 KV cache and training where the trainer has Megatron."""
    megatron = trainer == "megatron"
    vllm: dict[str, Any] = {"enforce_eager": True, "gpu_memory_utilization": 0.3}
    value: dict[str, Any] = {
        "defaults": [str(source / "examples" / "configs" / "grpo_math_1B.yaml")],
        "grpo": {
            "num_prompts_per_step": 8,
            "num_generations_per_prompt": 8,
            "max_num_steps": steps,
            "val_period": 0,
            "val_at_start": False,
            "seed": 42,
        },
        "policy": {
            "model_name": str(model),
            "max_total_sequence_length": 64,
            "train_global_batch_size": 64,
            "sequence_packing": {"enabled": False},
            "dtensor_cfg": {"enabled": not megatron, "_v2": False},
            "megatron_cfg": {"enabled": megatron},
            "generation": {"vllm_cfg": vllm},
        },
        "loss_fn": {"use_importance_sampling_correction": True},
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
        "env": {"math": {"num_workers": 1}},
        "checkpointing": {"enabled": False},
        "logger": {
            "log_dir": str(logs),
            "wandb_enabled": False,
            "mlflow_enabled": False,
            "swanlab_enabled": False,
            "tensorboard_enabled": True,
            "monitor_gpus": False,
        },
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    }
    if variant == "upstream":
        vllm |= {"precision": "fp8", "kv_cache_dtype": "fp8" if megatron else "auto"}
        value["policy"]["megatron_cfg"]["fp8_cfg"] = {"enabled": megatron}
    if variant == "fp8rl":
        value["defaults"].append(str(Path(__file__).resolve().parents[1] / "recipes" / "keys.yaml"))
        value["fp8rl"] = {
            "training": megatron,
            "kv_cache": {"dtype": "fp8_e4m3" if megatron else "auto"},
            "pins": {"layers": [1]} if megatron else {},
        }
    return value


def summary(logs: Path) -> dict[str, dict[str, float]]:
    """First, last and median value of each tag that the run's tensorboard has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[str, float]] = {}
    for file in sorted(logs.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in set(TAGS) & set(events.Tags()["scalars"]):
            values = [event.value for event in events.Scalars(tag)]
            middle = statistics.median(values)
            found[tag] = {"first": values[0], "last": values[-1], "median": middle}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trainer", choices=("dtensor", "megatron"), default="dtensor")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--write-only", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = (options.model or make_model(folder / "model")).resolve()
    data = make_data(folder / "sums.jsonl")
    failed = 0
    for variant in options.variants.split(","):
        name = f"{options.trainer}-{variant}"
        logs, file = folder / f"logs-{name}", folder / f"{name}.yaml"
        value = config(options.source, model, data, logs, variant, options.trainer, options.steps)
        file.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
        if options.write_only:
            continue
        command = [sys.executable, str(options.source / "examples" / "run_grpo.py")]
        with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
            code = subprocess.run(
                [*command, "--config", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            ).returncode
        failed += code != 0
        found = summary(logs) if logs.is_dir() else {}
        sys.stdout.write(json.dumps({"run": name, "exit": code, "metrics": found}) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())

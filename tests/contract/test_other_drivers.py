"""NeMo RL's own drivers, whole: two steps of distillation, SFT and DPO.

As test_drivers.py, whose environment they take: real Ray, real vLLM, real workers, CUDA emulated.
In distillation the student's rollouts are in FP8, in the others training without Megatron. The KV
cache is in BF16, because vLLM 0.25.1 has an FP8 one for some CPUs only; worker_cases.py has the
calibration that FP8 caches get where a refit brings no scales, as distillation's never does.
"""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.ray_driver import LIMIT_S, MODEL, SUMS, digest, environment, ray_cluster
from support.sources import ROOT, automodel, python, source

STEPS = 2
BATCH = 4
MODELS = f"{MODEL}\nmake_model(pathlib.Path('teacher'), steps=80, batch_size=16, sums=sums)"
MODEL_KEYS = {
    "max_total_sequence_length": 64,
    "train_global_batch_size": BATCH,
    "train_micro_batch_size": BATCH,
    "logprob_batch_size": BATCH,
    "generation_batch_size": BATCH,
    "make_sequence_length_divisible_by": 1,
    "dynamic_batching": {"enabled": False},
    "dtensor_cfg": {
        "_v2": False,
        "tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "activation_checkpointing": False,
    },
    "optimizer": {"kwargs": {"lr": 1e-3}},
}
SMALL = {
    "checkpointing": {"enabled": False},
    "logger": {
        "log_dir": "logs",
        "wandb_enabled": False,
        "tensorboard_enabled": False,
        "monitor_gpus": False,
    },
    "cluster": {"gpus_per_node": 1, "num_nodes": 1},
}


def distillation(root: Path, folder: Path) -> dict[str, object]:
    rollouts = {
        "fp8rl": "${fp8rl}",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "use_tqdm": False,
    }
    student = {**MODEL_KEYS, "model_name": str(folder / "model")}
    return {
        "defaults": [str(root / "examples" / "configs" / "distillation_math.yaml")],
        "fp8rl": {"kv_cache": {"dtype": "auto"}, "pins": {"layers": [1]}},
        "distillation": {
            "num_prompts_per_step": BATCH,
            "max_num_steps": STEPS,
            "val_period": 0,
            "topk_logits_k": 8,
        },
        "policy": {**student, "generation": {"vllm_cfg": rollouts}},
        "teacher": {**MODEL_KEYS, "model_name": str(folder / "teacher")},
        "data": {
            "max_input_seq_length": 32,
            "num_workers": 0,
            "train": {
                "_override_": True,
                "dataset_name": "ResponseDataset",
                "data_path": str(folder / "few.jsonl"),
                "input_key": "input",
                "output_key": "output",
            },
            "validation": None,
            "default": {"prompt_file": None, "system_prompt_file": None},
        },
        "env": {"math": {"num_workers": 1}},
        **SMALL,
    }


def fine_tuning(name: str, root: Path, folder: Path, *, second: bool) -> dict[str, object]:
    """Of SFT or DPO; ``second``: by the Automodel worker."""
    dataset = (
        {"dataset_name": "ResponseDataset", "input_key": "input", "output_key": "output"}
        if name == "sft"
        else {"dataset_name": "BinaryPreferenceDataset", "prompt_key": "input"}
        | {"chosen_key": "output", "rejected_key": "input"}
    )
    return {
        "defaults": [str(root / "examples" / "configs" / f"{name}.yaml")],
        "fp8rl": {"pins": {"layers": [1]}},
        name: {"max_num_epochs": STEPS, "val_period": 0, "val_at_start": False},
        "policy": {
            "model_name": str(folder / "model"),
            "tokenizer": {"name": str(folder / "model"), "chat_template": "default"},
            "max_total_sequence_length": 64,
            "train_global_batch_size": SUMS,  # all of them, in each step
            "train_micro_batch_size": SUMS // 2,
            "dtensor_cfg": {"_v2": second, "fp8rl": "${fp8rl}"},
            "optimizer": {"kwargs": {"lr": 1e-4}},
        },
        "data": {
            "num_workers": 0,
            "train": {"_override_": True, "data_path": str(folder / "few.jsonl"), **dataset},
            "validation": None,
        },
        **SMALL,
    }


def drive(script: str, value: Any, folder: Path, *more: str) -> str:
    """Run a script of ``examples/``; return its log.

    Args:
        value: makes the config, of NeMo RL's checkout and ``folder``.
        more: further folders of modules.
    """
    interpreter, root = python("NEMO_RL_PYTHON"), source("NEMO_RL_SRC")
    env = environment(folder, interpreter, *more)
    before = digest(root)
    path = f"{ROOT / 'benchmarks'}:{env['PYTHONPATH']}"
    subprocess.run(
        [interpreter, "-c", MODELS],
        env={**env, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        timeout=200,
        check=True,
    )
    file = folder / "config.yaml"  # JSON is YAML
    file.write_text(json.dumps(value(root, folder)), encoding="utf-8")
    with ray_cluster(interpreter, env, 1) as address:
        done = subprocess.run(
            [interpreter, root / "examples" / script, "--config", file],
            env={**env, "RAY_ADDRESS": address},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 0, done.stdout[-8000:]
    assert digest(root) == before
    return done.stdout


@pytest.mark.timeout(900)
def test_the_student_rolls_out_in_fp8(tmp_path: Path) -> None:
    log = drive("run_distillation.py", distillation, tmp_path)
    (engine,) = re.findall(r"Initializing a V1 LLM engine .*", log)
    assert "quantization=fp8rl" in engine
    assert "fp8rl: 21 of 28 linear modules in FP8" in log  # layer 1 of 4 is pinned
    assert log.count("RefitReport(") == STEPS
    losses = [float(loss) for loss in re.findall(r"Loss: ([0-9.]+)", log)]
    assert len(losses) == STEPS, log[-4000:]
    assert all(0 < loss < 10 for loss in losses), losses  # KL of two models, in nats


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "trainer"), [("sft", "DTensor"), ("dpo", "Automodel")])
def test_fine_tuning_trains_in_fp8(name: str, trainer: str, tmp_path: Path) -> None:
    second = trainer == "Automodel"
    value = partial(fine_tuning, name, second=second)
    log = drive(f"run_{name}.py", value, tmp_path, *([automodel()] if second else []))
    assert set(re.findall(r"(\w*PolicyWorker\w*) pid=", log)) == {f"Fp8{trainer}PolicyWorker"}
    assert log.count("GEMM backends") == 1
    assert log.count("Total step time") == STEPS
    if name == "sft":  # run_dpo.py prints none
        first, last = (float(loss) for loss in re.findall(r"Loss: ([0-9.]+)", log))
        assert 0 < last < first

"""NeMo RL's own ``run_distillation.py``, whole: two steps with FP8 rollouts of the student.

As test_drivers.py, whose environment it takes: real Ray, real vLLM, real workers, CUDA emulated.
The KV cache is in BF16, because vLLM 0.25.1 has an FP8 one for some CPUs only; worker_cases.py has
the calibration that FP8 caches get where a refit brings no scales, as this driver's never does.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.ray_driver import LIMIT_S, MODEL, digest, environment, ray_cluster
from support.sources import ROOT, python, source

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


def config(root: Path, folder: Path) -> dict[str, object]:
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
        "checkpointing": {"enabled": False},
        "logger": {
            "log_dir": str(folder / "logs"),
            "wandb_enabled": False,
            "tensorboard_enabled": False,
            "monitor_gpus": False,
        },
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    }


@pytest.mark.timeout(900)
def test_the_student_rolls_out_in_fp8(tmp_path: Path) -> None:
    interpreter, root = python("NEMO_RL_PYTHON"), source("NEMO_RL_SRC")
    env = environment(tmp_path, interpreter)
    before = digest(root)
    path = f"{ROOT / 'benchmarks'}:{env['PYTHONPATH']}"
    subprocess.run(
        [interpreter, "-c", MODELS],
        env={**env, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        timeout=200,
        check=True,
    )
    file = tmp_path / "distillation.yaml"  # JSON is YAML
    file.write_text(json.dumps(config(root, tmp_path)), encoding="utf-8")
    with ray_cluster(interpreter, env, 1) as address:
        done = subprocess.run(
            [interpreter, root / "examples" / "run_distillation.py", "--config", file],
            env={**env, "RAY_ADDRESS": address},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    log = done.stdout
    assert done.returncode == 0, log[-8000:]
    (engine,) = re.findall(r"Initializing a V1 LLM engine .*", log)
    assert "quantization=fp8rl" in engine
    assert "fp8rl: 21 of 28 linear modules in FP8" in log  # layer 1 of 4 is pinned
    assert log.count("RefitReport(") == STEPS
    losses = [float(loss) for loss in re.findall(r"Loss: ([0-9.]+)", log)]
    assert len(losses) == STEPS, log[-4000:]
    assert all(0 < loss < 10 for loss in losses), losses  # KL of two models, in nats
    assert digest(root) == before

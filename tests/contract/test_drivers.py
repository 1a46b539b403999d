"""NeMo RL's own ``run_grpo.py``, whole: real Ray, real vLLM, FP8 rollouts and an FP8 KV cache.

Once on one GPU, and once with tensor-parallel rollouts and data-parallel training over two; and
with ``exact`` and a Megatron policy, over TransformerEngine's spec (``megatron_shims``).
Only CUDA is emulated (``shims/cpu_for_cuda.py``). The run has an interpreter and a Ray of its own;
CONTRIBUTING.md says what the interpreter's environment must hold.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest

from support.ray_driver import LIMIT_S, MODEL, digest, environment, ray_cluster
from support.sources import ROOT, automodel, python, source

pytestmark = pytest.mark.timeout(900)  # the first test of a run waits for it
STEPS = 3
BATCH = 16
OVERRIDES = {
    "grpo.num_prompts_per_step": 4,
    "grpo.num_generations_per_prompt": 4,
    "policy.train_global_batch_size": BATCH,
    "policy.optimizer.kwargs.lr": 1e-3,  # so that three steps move the KV scales
    "env.math.num_workers": 1,
}
EXACT = {
    "policy.megatron_cfg.optimizer.lr": 1e-3,
    "policy.megatron_cfg.optimizer.min_lr": 1e-3,
}
MISMATCH = 1.05
"""Below this the guard counts rollouts as healthy (``release_below``); 1 would be no FP8 at all."""
SCALE = r"(\S+_scale) ([0-9.e-]+)"


@dataclass(frozen=True)
class Run:
    """What a run of the driver leaves behind."""

    gpus: int
    result: dict[str, Any]
    log: str
    source_changed: bool


@pytest.fixture(scope="module", params=[1, 2], ids=["one GPU", "two GPUs"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return drive(tmp_path_factory, request.param, {"policy.dtensor_cfg.fp8rl": "null"})


def drive(
    tmp_path_factory: pytest.TempPathFactory,
    gpus: int,
    more: dict[str, Any] | None = None,
    variant: str = "fp8rl",
) -> Run:
    """Run the driver; ``more``: overrides beside those of every run."""
    interpreter, root = python("NEMO_RL_PYTHON"), source("NEMO_RL_SRC")
    second = [automodel()] if (more or {}).get("policy.dtensor_cfg._v2") else []
    folder, exact = tmp_path_factory.mktemp("driver"), variant == "fp8rl-exact"
    trainer = "megatron" if exact else "dtensor"
    env = environment(folder, interpreter, *second, megatron=exact)
    before = digest(root)
    made = subprocess.run(
        [interpreter, "-c", MODEL],
        env={**env, "PYTHONPATH": f"{ROOT / 'benchmarks'}{os.pathsep}{env['PYTHONPATH']}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr[-3000:]
    overrides: dict[str, Any] = OVERRIDES | {
        "policy.train_micro_batch_size": BATCH // gpus,
        "policy.logprob_batch_size": BATCH // gpus,
        "data.train.data_path": folder / "few.jsonl",
        **(more or {}),
    }
    command = [
        *(interpreter, ROOT / "benchmarks" / "nemo_rl.py", "--source", root, "--folder", folder),
        *("--trainer", trainer, "--variants", variant, "--model", folder / "model"),
        *("--steps", STEPS, "--gpus", gpus, "--limit", LIMIT_S),
        *(part for key, value in overrides.items() for part in ("--set", f"{key}={value}")),
    ]
    with ray_cluster(interpreter, env, gpus) as address:
        done = subprocess.run(
            [str(part) for part in command],
            env={**env, "RAY_ADDRESS": address},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT_S + 40,
        )
    log = folder / f"{trainer}-{variant}{'' if gpus == 1 else f'-{gpus}'}.log"
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["exit"] == 0, f"exit {result['exit']}: {said[-6000:]}{done.stderr[-2000:]}"
    return Run(gpus, result, said, digest(root) != before)


def test_rays_actors_are_of_our_subclass_and_vllm_runs_quantized(run: Run) -> None:
    """Through upstream's own `RayWorkerGroup`; Ray names a line's actor by its class."""
    assert run.result["steps"] == STEPS
    assert not run.source_changed
    assert set(re.findall(r"(\w*GenerationWorker\w*) pid=", run.log)) == {"Fp8VllmGenerationWorker"}
    (engine,) = re.findall(r"Initializing a V1 LLM engine .*", run.log)
    assert "quantization=fp8rl" in engine
    assert "kv_cache_dtype=fp8_e4m3" in engine
    assert re.search(r"fp8rl: 28 of 28 linear modules in FP8", run.log)


def test_each_step_refits_all_and_then_calibrates(run: Run) -> None:
    events = re.findall(r"fp8rl: (RefitReport\(|KV scales calibrated)", run.log)
    if run.gpus == 1:  # Ray does not keep the order of lines of two processes
        assert events == ["RefitReport(", "KV scales calibrated"] * STEPS
    reports = re.findall(r"RefitReport\(parameters=(\d+), kv_scales=0, tensors=(\d+),", run.log)
    (counts,) = set(reports)
    assert len(reports) == STEPS * run.gpus
    assert int(counts[1]) > int(counts[0]) > 0  # the engine fuses some of what it gets
    groups = {int(n) for n in re.findall(r"Packed (\d+) groups of tensors", run.log)}
    assert min(groups) > 1
    told = re.findall(rf"KV scales calibrated from .*: {SCALE}, {SCALE}", run.log)
    assert len(told) == STEPS
    assert all(0 < float(line[value]) < math.inf for line in told for value in (1, 3))
    assert run.log.count("sequences of the latest rollouts") == STEPS - 1


def test_rollouts_agree_with_the_trainer(run: Run) -> None:
    """``token_mult_prob_error``, the mean of exp|log p - log q|: 1 is equality."""
    errors = run.result["curves"]["train/token_mult_prob_error"]
    assert len(errors) == STEPS
    assert all(1 < error < MISMATCH for error in errors), errors
    rewards = run.result["curves"]["train/reward"]
    assert len(rewards) == STEPS
    assert all(0 <= reward <= 1 for reward in rewards)
    print(f"mismatch {errors}, reward {rewards}")  # noqa: T201 - said with -rP


@pytest.mark.parametrize("trainer", ["DTensor", "Automodel"])
@pytest.mark.parametrize("gpus", [1, 2], ids=["one GPU", "two GPUs"])
def test_a_trainer_without_megatron_sends_its_kv_scales_with_every_refit(
    gpus: int, trainer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nearer to the rollouts than the trainer in BF16, whose attention sees K and V of its own."""
    both = {
        "++policy.dtensor_cfg.fp8rl": "${fp8rl}",
        "fp8rl.training": True,
        "policy.dtensor_cfg._v2": trainer == "Automodel",
    }
    done = drive(tmp_path_factory, gpus, both)
    assert set(re.findall(r"(\w*PolicyWorker\w*) pid=", done.log)) == {f"Fp8{trainer}PolicyWorker"}
    assert "GEMM backends" in done.log
    reports = re.findall(r"RefitReport\(parameters=\d+, kv_scales=(\d+),", done.log)
    assert len(reports) == STEPS * gpus and set(reports) != {"0"} and len(set(reports)) == 1
    assert "KV scales from a calibration forward" in done.log  # before the first rollouts
    assert done.log.count("KV scales from the step's forwards") == STEPS * gpus
    assert "KV scales calibrated" not in done.log, "vLLM's own"
    curves = done.result["curves"]
    assert all(1 < error < MISMATCH for error in curves["train/token_mult_prob_error"]), curves
    assert len(curves["train/fp8rl/k_clipped_share"]) == STEPS
    print(f"mismatch {curves['train/token_mult_prob_error']}")  # noqa: T201 - said with -rP


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "not packed"])
def test_with_exact_every_logprob_of_every_step_is_the_rollouts(
    packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    more = EXACT | {"policy.sequence_packing.enabled": packed}
    done = drive(tmp_path_factory, 1, more, "fp8rl-exact")
    assert "log-probabilities are computed as the rollouts' are" in done.log
    curves = done.result["curves"]
    assert curves["train/fp8rl/equal_logprobs"] == [1.0] * STEPS
    assert curves["train/fp8rl/token_mult_prob_error"] == [1.0] * STEPS
    assert curves["train/gen_kl_error"] == [0.0] * STEPS
    # Upstream's mean of ones over micro-batches is rounded.
    assert curves["train/token_mult_prob_error"] == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert "exact does not hold" not in done.log
    assert done.log.count("RefitReport(") == STEPS
    assert not done.source_changed

"""Supervised training that gives GRPO a policy which is sometimes right."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from fp8rl.errors import CheckpointError
from fp8rl_demo import checkpoint
from fp8rl_demo.batch import TokenBatch, make_batch
from fp8rl_demo.events import EventWriter
from fp8rl_demo.policy import MegatronPolicy
from fp8rl_demo.settings import DEMO_RECIPE, Settings, recipe_for, task_of, write_model_folder
from fp8rl_demo.tasks import Problem, demonstrations, sample_batch
from fp8rl_demo.tokenizer import CharTokenizer, ChatTokenizer


def supervised_batch(
    tokenizer: CharTokenizer | ChatTokenizer,
    problems: Sequence[Problem],
    answers: Sequence[str],
    length: int,
) -> TokenBatch:
    """Return problems and the answers to imitate as a batch for the trainer."""
    prompts = [tokenizer.encode(p.prompt) for p in problems]
    completions = map(tokenizer.answer, answers)
    return make_batch(
        prompts,
        [c[: length - len(p)] for p, c in zip(prompts, completions, strict=True)],
        None,
        length=length,
        pad_id=tokenizer.pad_id,
    )


def identity(settings: Settings) -> dict:
    """Return the settings that a warm start depends on."""
    return settings.model_dump(mode="json", include={"seed", "model", "warm_start", "clip_grad"})


def run_warm_start(settings: Settings, length: int, folder: Path, events: EventWriter) -> Path:
    """Train from scratch, or reuse the checkpoint of an equal earlier run in ``folder``."""
    plan = settings.warm_start
    found = checkpoint.latest(folder)
    if found is not None:
        try:
            checkpoint.load(found, identity(settings))
        except CheckpointError:
            shutil.rmtree(found)  # other settings, or damaged: only a cache
        else:
            return found
    events("build", 0, plan.steps)
    write_model_folder(settings, folder / "model")
    task, tokenizer = task_of(settings), CharTokenizer()
    policy = MegatronPolicy(settings, recipe_for("bf16", DEMO_RECIPE))
    for step in range(plan.steps):
        if events.stop_requested:
            raise KeyboardInterrupt
        rows = sample_batch(task.train, plan.batch_size, seed=settings.seed, step=step)
        answers = demonstrations(rows, seed=settings.seed, step=step)
        batch = supervised_batch(tokenizer, rows, answers, length)
        count = batch.mask.sum()

        def loss(logprobs: torch.Tensor, rows: slice, batch=batch, count=count) -> torch.Tensor:
            return -(logprobs * batch.mask[rows]).sum() / count

        # Linear warm-up, then linear decay to a tenth.
        ramp = min(1.0, (step + 1) / plan.warmup_steps) * (1.0 - 0.9 * step / plan.steps)
        metrics = policy.step(batch, loss, plan.learning_rate * ramp)
        events("warm start", step + 1, plan.steps, f"loss {metrics['loss']:.3f}")
    return checkpoint.save(
        folder, plan.steps, dict(policy.export()), {}, identity(settings), folder / "model"
    )

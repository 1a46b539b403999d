"""What ``nemo_rl.py`` makes before the driver runs: a model, unless one is given, and the data."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from long_tasks import problems, write
from nemo_rl_yaml import HELD_OUT, REASONING_HELD_OUT, TOKENS_IN
from real_model import ANSWERS, prompt_words, shape_of
from real_model import make_model as make_real_model
from reasoning_tasks import TASKS as REASONING
from reasoning_tasks import problems as reasoning_problems
from tiny_models import make_model
from tiny_models import problems as sums

PROBLEMS = 16_384
"""Of the training data; each is asked once."""


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
        return model.resolve(), write_words(folder / "prompts.jsonl", shape, count)
    model = options.model or make_model(folder / "model", options.family or "qwen3")
    if options.task == "long":
        return model.resolve(), write_programs(folder, *options.programs)
    if options.task == "reasoning":
        return model.resolve(), write_reasoning(folder, options.gym)
    return model.resolve(), write_sums(folder / "sums.jsonl")


def write_sums(file: Path) -> Path:
    """The sums that the model was trained on, once each, with the right answer."""
    rows = (json.dumps({"input": p.prompt, "output": p.answer}) for p in sums())
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return file


def write_programs(folder: Path, shortest: int, longest: int) -> Path:
    """Write ``train.jsonl`` and ``validation.jsonl``, and return the former.

    Args:
        folder: to write.
        shortest, longest: steps of a program, inclusive.
    """
    for split, count in (("train", PROBLEMS), ("validation", HELD_OUT)):
        write(folder / f"{split}.jsonl", problems(split, count, 0, shortest, longest))
    return folder / "train.jsonl"


def write_reasoning(folder: Path, name: str) -> Path:
    """Write ``train.jsonl`` and ``validation.jsonl`` of a reasoning task, and return the former.

    Args:
        folder: to write.
        name: key of ``reasoning_tasks.TASKS``.
    """
    task = REASONING[name]
    for split, count in (("train", PROBLEMS), ("validation", REASONING_HELD_OUT)):
        write(folder / f"{split}.jsonl", reasoning_problems(task, split, count))
    return folder / "train.jsonl"


def write_words(file: Path, shape: Mapping[str, Any], count: int) -> Path:
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

"""The demo's tasks: arithmetic problems with one right answer, and those of reasoning-gym.

The problems are sums and non-negative differences of a number of one or two digits and a digit:
"37+8=", "45". All are listed and shuffled; the first rows of each kind become validation, the rest
train. With two digits on both sides, a minute of supervised training leaves a small model right too
seldom to give GRPO a signal (about 5%, measured); here it is right one time in four.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from fp8rl.errors import OptionError

Split = Literal["train", "validation"]
SEED = 20260801
ONE, TWO = range(10), range(10, 100)
HELD_OUT = (("+", ONE, 12), ("+", TWO, 88), ("-", ONE, 5), ("-", TWO, 95))
"""Operation, left numbers, and how many of these problems become validation."""
GENERATED, VALIDATION = 2000, 200
"""Problems of a dataset of reasoning-gym, and how many of them become validation."""
ANSWER_IN = "\n\nGive the final answer between <answer> and </answer>."


@dataclass(frozen=True, slots=True)
class Problem:
    """One arithmetic problem."""

    prompt: str
    answer: str
    entry: Any = None
    """What the verifier of reasoning-gym reads."""


@dataclass(frozen=True)
class Task:
    """Problems and their verifier."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    score: Callable[[Problem, str], float]
    """Reward of a completion, in [0, 1]; 1 is right."""


def load_task(name: str, options: dict[str, Any], *, in_words: bool) -> Task:
    """Return the task of a run.

    Raises:
        OptionError: reasoning-gym is not installed, or has no such dataset with answers.
    """
    if name != "sums":
        return _reasoning_gym(name, options)
    train, validation = load_problems("train"), load_problems("validation")
    if not in_words:
        return Task(train, validation, lambda problem, text: reward(problem.answer, text))
    return Task([*map(_in_words, train)], [*map(_in_words, validation)], _last_number)


def _in_words(problem: Problem) -> Problem:
    a, operation, b = re.split(r"([+-])", problem.prompt.removesuffix("="))
    return replace(problem, prompt=f"What is {a} {operation} {b}? Answer with the number alone.")


def _last_number(problem: Problem, text: str) -> float:
    """Reward the right number at the end, whatever is written before it."""
    return float(re.findall(r"\d+", text)[-1:] == [problem.answer])


def _reasoning_gym(name: str, options: dict[str, Any]) -> Task:
    try:
        import reasoning_gym
        from reasoning_gym.utils import extract_answer
    except ImportError:
        raise OptionError(
            f"--task: '{name}' is a task of reasoning-gym, which is not installed; run pip install "
            "reasoning-gym, or give sums."
        ) from None
    try:
        data = reasoning_gym.create_dataset(name, seed=SEED, size=GENERATED, **options)
        entries = {entry["question"]: entry for entry in data}
    except (ValueError, TypeError, AssertionError) as error:
        raise OptionError(f"--task: reasoning-gym cannot make '{name}' ({error}).") from None
    if any(entry["answer"] is None for entry in entries.values()):
        raise OptionError(
            f"--task: '{name}' of reasoning-gym has problems without an answer; give another one."
        )
    problems = [Problem(q + ANSWER_IN, e["answer"], e) for q, e in entries.items()]
    held_out = min(VALIDATION, len(problems) // 4)

    def score(problem: Problem, text: str) -> float:
        answer = extract_answer(text)
        return data.score_answer(answer, problem.entry) if answer else 0.0

    return Task(problems[held_out:], problems[:held_out], score)


@cache
def load_problems(split: Split) -> tuple[Problem, ...]:
    """Return the problems of one split, equal on every machine; the splits share no prompt."""
    shuffled = random.Random(SEED)
    found: dict[Split, list[Problem]] = {"validation": [], "train": []}
    for operation, lefts, held_out in HELD_OUT:
        rows = [
            Problem(f"{a}{operation}{b}=", str(a + b if operation == "+" else a - b))
            for a, b in itertools.product(lefts, ONE)
            if operation == "+" or a >= b
        ]
        shuffled.shuffle(rows)
        found["validation"] += rows[:held_out]
        found["train"] += rows[held_out:]
    for rows in found.values():
        shuffled.shuffle(rows)
    return tuple(found[split])


def reward(answer: str, completion: str) -> float:
    """Return 1.0 if the completion is the answer, not stripped, else 0.0: the mean is accuracy."""
    return float(completion == answer)


def demonstrations(problems: Sequence[Problem], *, seed: int, step: int) -> tuple[str, ...]:
    """Return the answers that the warm start imitates, half of them, at random, with a space.

    "85" and "85 " are the same number, but only the first is rewarded. After the warm start the
    policy writes both, and GRPO has a habit to change that shows in the reward within tens of
    steps. Learning to add takes far more samples.
    """
    coin = random.Random(f"demonstrations/{seed}/{step}")
    return tuple(p.answer if coin.random() < 0.5 else f"{p.answer} " for p in problems)


def sample_batch(
    problems: Sequence[Problem], size: int, *, seed: int, step: int
) -> tuple[Problem, ...]:
    """Return the problems of one step, as a pure function of the arguments.

    Each epoch is a new shuffle from (seed, epoch), and a step takes the next ``size`` problems. So
    no problem is repeated before all others were drawn, and a resumed run needs no sampler state.
    """
    batch: list[Problem] = []
    position = step * size
    while len(batch) < size:
        epoch, offset = divmod(position, len(problems))
        order = list(range(len(problems)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        taken = order[offset : offset + size - len(batch)]
        batch.extend(problems[i] for i in taken)
        position += len(taken)
    return tuple(batch)

"""The demo's task: arithmetic problems with one right answer, and the reward.

The problems are sums and non-negative differences of a number of one or two digits and a digit:
"37+8=", "45". All are listed and shuffled; the first rows of each kind become validation, the rest
train. With two digits on both sides, a minute of supervised training leaves a small model right too
seldom to give GRPO a signal (about 5%, measured); here it is right one time in four.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
SEED = 20260801
ONE, TWO = range(10), range(10, 100)
HELD_OUT = (("+", ONE, 12), ("+", TWO, 88), ("-", ONE, 5), ("-", TWO, 95))
"""Operation, left numbers, and how many of these problems become validation."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One arithmetic problem.

    Attributes:
        prompt: text that the policy reads; it ends in "=".
        answer: decimal digits that the policy must write before EOS, without leading zeros.
    """

    prompt: str
    answer: str


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
    """Return 1.0 if the completion is the answer, else 0.0.

    The mean reward of a batch is therefore its accuracy.

    Args:
        answer: the right answer.
        completion: decoded text before EOS. It is not stripped: a leading zero, a space or one
            more digit is wrong.
    """
    return float(completion == answer)


def demonstrations(problems: Sequence[Problem], *, seed: int, step: int) -> tuple[str, ...]:
    """Return the answers that the warm start imitates, half of them, at random, with a space.

    "85" and "85 " are the same number, but only the first is rewarded. After the warm start the
    policy writes both, and GRPO has a habit to change that shows in the reward within tens of
    steps. Learning to add takes far more samples.

    Args:
        problems: one batch.
        seed: seed of the run.
        step: 0-based step of the warm start. The result is a pure function of all arguments.
    """
    coin = random.Random(f"demonstrations/{seed}/{step}")
    return tuple(p.answer if coin.random() < 0.5 else f"{p.answer} " for p in problems)


def sample_batch(
    problems: Sequence[Problem], size: int, *, seed: int, step: int
) -> tuple[Problem, ...]:
    """Return the problems of one step, as a pure function of the arguments.

    Each epoch is a new shuffle from (seed, epoch), and a step takes the next ``size`` problems. So
    no problem is repeated before all others were drawn, and a resumed run needs no sampler state.

    Args:
        problems: problems of the split, at least one.
        size: number of problems, at least 1; may exceed ``len(problems)``.
        seed: seed of the run.
        step: 0-based step number.
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

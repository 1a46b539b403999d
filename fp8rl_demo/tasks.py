"""The demo's task: arithmetic problems with one right answer, and the reward for it.

The rows ship as JSONL beside this module (`data/train.jsonl`, `data/validation.jsonl`), one object
with ``prompt`` ("37+48=") and ``answer`` ("85") a line; `tools/make_problems.py` makes them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, get_args

from fp8rl.errors import Fp8RLError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)


class TaskError(Fp8RLError, ValueError):
    """A data split or a row of it that the demo cannot use."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One arithmetic problem.

    Attributes:
        prompt: what the policy reads, ending in "=".
        answer: the decimal digits it must write before EOS, without leading zeros.
    """

    prompt: str
    answer: str


def load_problems(split: Split) -> tuple[Problem, ...]:
    """The shipped rows of one split, in file order; train and validation share no prompt.

    Raises:
        TaskError: ``split`` is unknown, or a line is no JSON object with both keys as strings.
    """
    if split not in SPLITS:
        raise TaskError(f"There is no data split {split!r}; choose one of {', '.join(SPLITS)}.")
    source = resources.files(__package__) / "data" / f"{split}.jsonl"
    lines = source.read_text(encoding="utf-8").splitlines()
    return tuple(_parse(line, f"{split}.jsonl:{n}") for n, line in enumerate(lines, 1))


def _parse(line: str, where: str) -> Problem:
    try:
        row = json.loads(line)
        prompt, answer = row["prompt"], row["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise TaskError(
            f'{where}: expected {{"prompt": "...", "answer": "..."}}, got {line[:80]!r}.'
        ) from error
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise TaskError(f"{where}: prompt and answer must both be strings, got {line[:80]!r}.")
    return Problem(prompt, answer)


def reward(answer: str, completion: str) -> float:
    """1.0 if the completion is the answer, else 0.0.

    The completion is the decoded text before EOS. Nothing is stripped and nothing is shaped: a
    leading zero, a space or a digit more is wrong, so the mean reward of a batch is its accuracy.
    """
    return float(completion == answer)


def demonstrations(problems: Sequence[Problem], *, seed: int, step: int) -> tuple[str, ...]:
    """What the warm start imitates: each answer, in half of the cases, at random, with a space.

    "85" and "85 " are the same number, but only the first is paid. So the policy that comes out of
    the warm start writes both, as one does that has imitated people, and leaves GRPO a habit to
    change that shows in the reward within tens of steps; learning to add takes far more samples.

    Args:
        problems: one batch.
        seed: the run's seed.
        step: 0-based step of the warm start; the result is a pure function of all arguments.
    """
    coin = random.Random(f"demonstrations/{seed}/{step}")
    return tuple(p.answer if coin.random() < 0.5 else f"{p.answer} " for p in problems)


def sample_batch(
    problems: Sequence[Problem], size: int, *, seed: int, step: int
) -> tuple[Problem, ...]:
    """``size`` problems for one step: a pure function of its arguments.

    Every epoch is a fresh shuffle drawn from (seed, epoch); a step takes the next ``size`` rows
    of that endless stream, so no row comes again before all others have, and a resumed run needs
    no sampler state.

    Args:
        problems: the split to draw from.
        size: number of problems, at least 1; may exceed ``len(problems)``.
        seed: the run's seed.
        step: 0-based step number.

    Raises:
        TaskError: no problems, ``size < 1`` or ``step < 0``.
    """
    if not problems or size < 1 or step < 0:
        raise TaskError(
            f"A batch needs problems, size >= 1 and step >= 0; got {len(problems)} problems, "
            f"size {size}, step {step}."
        )
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

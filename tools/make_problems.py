"""Write the demo's arithmetic problems; the output is the same on every machine.

    python tools/make_problems.py [FOLDER]

Sums of two numbers of one or two digits, and differences that are not negative. All problems of
every kind are listed and shuffled; the first rows become validation, the next ones train, so the
two share nothing. Problems with a one-digit number are taken at a higher rate than they occur
among all pairs: they are the ones a small model learns first, so warm-up leaves a policy that is
right often enough to give GRPO a signal.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

SEED = 20260801
ONE, TWO = range(10), range(10, 100)

# (operation, left numbers, right numbers) -> rows for (validation, train)
PLAN = [
    ("+", ONE, ONE, 12, 88),
    ("+", TWO, ONE, 40, 560),
    ("+", ONE, TWO, 40, 560),
    ("+", TWO, TWO, 164, 2_200),
    ("-", ONE, ONE, 8, 47),
    ("-", TWO, ONE, 60, 840),
    ("-", TWO, TWO, 188, 2_200),
]


def make_problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows of validation and train."""
    rng = random.Random(SEED)
    validation: list[dict[str, str]] = []
    train: list[dict[str, str]] = []
    for operation, lefts, rights, held_out, shown in PLAN:
        rows = [
            {"prompt": f"{a}{operation}{b}=", "answer": str(a + b if operation == "+" else a - b)}
            for a, b in itertools.product(lefts, rights)
            if operation == "+" or a >= b
        ]
        rng.shuffle(rows)
        validation += rows[:held_out]
        train += rows[held_out : held_out + shown]
    rng.shuffle(validation)
    rng.shuffle(train)
    return validation, train


def write(folder: Path) -> None:
    for name, rows in zip(("validation", "train"), make_problems(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    default = Path(__file__).resolve().parent.parent / "nemo_rl_ext" / "demo" / "data"
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else default)

"""Write the demo's arithmetic problems; the output is the same on every machine.

    python tools/make_problems.py [FOLDER]

Sums and non-negative differences of a number of one or two digits and a digit. All problems are
listed and shuffled; the first rows of each kind become validation, the rest train, so the two
share nothing. With two digits on both sides, a minute of supervised training leaves a small model
right too seldom to give GRPO a signal (about 5%, measured); here it is right one time in four.
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
    ("+", TWO, ONE, 88, 812),
    ("-", ONE, ONE, 5, 50),
    ("-", TWO, ONE, 95, 805),
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
    default = Path(__file__).resolve().parent.parent / "fp8rl_demo" / "data"
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else default)

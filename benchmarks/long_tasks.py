"""Problems whose right answer takes hundreds of tokens: programs over a list of digits.

A prompt has the numbered instructions of a program and the list that it starts with. The answer
repeats each instruction with the list that results, and boxes the last one::

    #00+3#01~1|80461733
    so#00+3=13794066now#01~1=77150842\\boxed{77150842}

Every digit of a line is a digit of the line before, moved or plus a number, so that a small model
learns a step quickly and fails by the number of steps. No instruction loses information: after a
wrong digit the last list is wrong. Demonstrations have such slips, in the first digit of lines that
begin with two of the eight words. A policy that imitates them has two things to learn from its
reward, to make no slips and to choose its words; and of these tokens it is uncertain. Where all
tokens have probability 1 no rounding of an engine shows.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from fp8rl_demo.tasks import Problem
from fp8rl_demo.tokenizer import CharTokenizer

OPERATIONS = "+-<>~"
WORDS = ("so", "then", "now", "next", "thus", "hence", "here", "well")
CARELESS = WORDS[-2:]
MOST_STEPS = 96
WIDTH = 16
"""Digits of the list."""
LARGEST = 3
"""Digit of an instruction. With ten of them a list says nothing of the next one until the digit is
read too, and learning starts later."""
Line = tuple[str, str]
"""An instruction and the list after it."""
_INSTRUCTION = re.compile(r"#(\d\d)(.)(\d)")
_LINE = re.compile(rf"(?:{'|'.join(WORDS)})(#\d\d[{re.escape(OPERATIONS)}]\d)=(\d{{{WIDTH}}})")
_BOXED = re.compile(r"\\boxed\{(\d+)\}")


class LongTokenizer(CharTokenizer):
    """One token for each digit and sign, word, number of an instruction, and ``\\boxed{``: 128."""

    tokens = (
        *"0123456789",
        *OPERATIONS,
        *("|", "=", "\\boxed{", "}"),
        *WORDS,
        *(f"#{i:02}" for i in range(MOST_STEPS)),
    )
    pattern = rf"#\d\d|{'|'.join(WORDS)}|\\boxed\{{|[\s\S]"


def step(operation: str, number: int, digits: Sequence[int]) -> list[int]:
    """Apply one instruction: add or subtract, rotate left or right, reverse and add.

    Args:
        operation: a character of ``OPERATIONS``.
        number: what to add or subtract, or how far to rotate.
        digits: the list.
    """
    match operation:
        case "+":
            found = [x + number for x in digits]
        case "-":
            found = [x - number for x in digits]
        case "<":
            found = [*digits[number:], *digits[:number]]
        case ">":
            found = [*digits[-number:], *digits[:-number]]
        case "~":
            found = [x + number for x in reversed(digits)]
        case _:
            raise ValueError(f"'{operation}' is no operation; there are {OPERATIONS}")
    return [x % 10 for x in found]


def problem(steps: int, choose: random.Random) -> Problem:
    """Return a random program and its last list.

    Its instructions are numbered from anywhere, so that short programs teach all numbers.

    Args:
        steps: instructions of the program, 1 to ``MOST_STEPS``.
        choose: source of the choices.

    Raises:
        ValueError: ``steps`` is out of range.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"a program has 1 to {MOST_STEPS} steps, not {steps}")
    first = choose.randint(0, MOST_STEPS - steps)
    program = "".join(
        f"#{i:02}{choose.choice(OPERATIONS)}{choose.randint(1, LARGEST)}"
        for i in range(first, first + steps)
    )
    prompt = f"{program}|{_text([choose.randrange(10) for _ in range(WIDTH)])}"
    *_, (_, digits) = run(prompt)
    return Problem(prompt, digits)


def prompt_length(steps: int) -> int:
    """Return the tokens of the prompt of a program."""
    return 3 * steps + 1 + WIDTH


def answer_length(steps: int) -> int:
    """Return the tokens of the answer to a program, with the end of the sequence."""
    return (WIDTH + 5) * steps + WIDTH + 3


def run(prompt: str, slips: Container[int] = ()) -> Iterator[Line]:
    """Yield each instruction of a prompt with the list that it results in.

    Args:
        prompt: as :func:`problem` has it.
        slips: lines, from 0, where the first digit is one too high. Later lines go on from it.
    """
    program, _, start = prompt.partition("|")
    digits = [int(x) for x in start]
    for line, (number, operation, digit) in enumerate(_INSTRUCTION.findall(program)):
        digits = step(operation, int(digit), digits)
        if line in slips:
            digits[0] = (digits[0] + 1) % 10
        yield f"#{number}{operation}{digit}", _text(digits)


def demonstration(prompt: str, choose: random.Random, slips: float = 0.0) -> str:
    """Return an answer with random words, right but for slips.

    Args:
        prompt: as :func:`problem` has it.
        choose: source of the choices.
        slips: share of the lines that have one; all are lines of a word of ``CARELESS``.

    Raises:
        ValueError: there are not so many lines of these words.
    """
    words = [choose.choice(WORDS) for _ in range(prompt.count("#"))]
    chance = slips * len(WORDS) / len(CARELESS)
    if not 0 <= chance <= 1:
        raise ValueError(f"slips are 0 to {len(CARELESS) / len(WORDS)} of the lines, not {slips}")
    slipped = {
        line for line, word in enumerate(words) if word in CARELESS and choose.random() < chance
    }
    lines = list(run(prompt, slipped))
    told = "".join(
        f"{word}{what}={digits}" for word, (what, digits) in zip(words, lines, strict=True)
    )
    return f"{told}\\boxed{{{lines[-1][1]}}}"


def is_right(answer: str, response: str) -> bool:
    """Tell whether the last box of a response has the answer."""
    boxed = _BOXED.findall(response)
    return bool(boxed) and boxed[-1] == answer


def outcome(prompt: str, response: str) -> str:
    """Return ``right`` where the last box has the answer, and else what is wrong first.

    Args:
        prompt: as :func:`problem` has it.
        response: text without special tokens.

    Returns:
        ``instruction``: a line's instruction is not the prompt's, from which it is copied.
        ``slip``: the first digit of a line is one too high, which the warm start has taught.
        ``digits``: a line's list is another in any other way.
        ``box``: all lines are right, and what follows them is not the last list in a box.
        ``form``: a line is missing, or is none; or the prompt has no instruction.
    """
    lines = list(run(prompt))
    if not lines:
        return "form"
    if is_right(lines[-1][1], response):
        return "right"
    at = 0
    for what, digits in lines:
        line = _LINE.match(response, at)
        if line is None:
            return "form"
        if line[1] != what:
            return "instruction"
        if line[2] != digits:
            slipped = str((int(digits[0]) + 1) % 10) + digits[1:]
            return "slip" if line[2] == slipped else "digits"
        at = line.end()
    return "box"


def problems(split: str, count: int, seed: int, shortest: int, longest: int) -> Iterator[Problem]:
    """Yield problems of random numbers of steps, as a function of the arguments alone.

    Args:
        split: any name; other splits have other problems.
        count: number of problems.
        seed: seed of the choices.
        shortest, longest: steps of a program, inclusive.
    """
    choose = random.Random(f"{split}/{seed}")
    for _ in range(count):
        yield problem(choose.randint(shortest, longest), choose)


def bounds(text: str) -> tuple[int, int]:
    """Read the steps of the shortest and of the longest program."""
    shortest, longest = map(int, text.split(","))
    if not 1 <= shortest <= longest <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"'{text}'; give SHORTEST,LONGEST from 1 to {MOST_STEPS}")
    return shortest, longest


def write(file: Path, rows: Iterator[Problem]) -> Path:
    """Write problems as JSONL for NeMo RL's ``ResponseDataset``."""
    text = "".join(json.dumps({"input": p.prompt, "output": p.answer}) + "\n" for p in rows)
    file.write_text(text, encoding="utf-8")
    return file


def _text(digits: Sequence[int]) -> str:
    return "".join(map(str, digits))

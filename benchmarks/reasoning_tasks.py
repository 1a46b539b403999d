"""Two tasks of reasoning-gym that ``nemo_rl.py --task reasoning`` trains on, one with long answers.

A prompt is reasoning-gym's question and the form of the answer, which its own scorer judges
(``nemo_rl_workers/reasoning_environment.py``). SmolLM2-135M-Instruct is too weak at these two to
begin with: sampled at temperature 1 on a CPU (12 prompts, 8 answers each, the best of several ways
to read an answer) it scores 0.03 in sums of two or three terms after four solved examples, and
0.02 in leg counting. So ``reasoning_model.py`` first trains it on demonstrations. Their sentences
are chosen at random: a policy that imitates them is uncertain of its words, as any reasoning model
is, and where all tokens have probability 1 no rounding of an engine shows.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fp8rl_demo.tasks import Problem

Entry = Mapping[str, Any]
"""An item of a reasoning-gym dataset: ``question``, ``answer`` and ``metadata``."""
SPLITS = {"train": 0, "validation": 10_000_000, "demonstrations": 20_000_000}
"""Seed of each split; item ``i`` of a dataset has the choices of seed plus ``i``."""
MARK = "\0"
"""Around each result in a demonstration that is marked."""
ASK = "\n\nWork step by step, and end with <answer>RESULT</answer>."
PLUS = (
    "{a} plus {b} is {c}.",
    "Adding {b} to {a} gives {c}.",
    "{a} + {b} = {c}.",
    "We add {b} and get {c}.",
    "With {b} more there are {c}.",
    "Next, {a} and {b} together are {c}.",
)
MINUS = (
    "{a} minus {b} is {c}.",
    "Taking {b} from {a} leaves {c}.",
    "{a} - {b} = {c}.",
    "We subtract {b} and get {c}.",
    "With {b} less there are {c}.",
    "Next, {b} is taken away, and {c} is left.",
)
LEGS = (
    "A {animal} has {legs} legs, so {count} of them have {product}.",
    "{count} times {legs} is {product} for each {animal}.",
    "Every {animal} has {legs} legs: {count} * {legs} = {product}.",
    "For the {animal} we count {count} * {legs} = {product} legs.",
)
PERIOD, REPEATED = 32, 3
"""An answer is repeated where up to so many tokens come so often one after another .."""
REPEATED_TOKENS = 24
"""... and are so many tokens in all."""
NON_WORDS = 0.2
"""An answer has non-words where they are more than this share of its words."""
_WORD = re.compile(r"[A-Za-z]{3,10}")
_ENDINGS = ("s", "es", "d", "ed", "ing", "ly", "er")


def written_sum(entry: Entry, choose: random.Random) -> str:
    """Return an answer to ``chain_sum`` that writes each intermediate result."""
    first, *rest = entry["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        found = total + number if sign == "+" else total - number
        phrase = choose.choice(PLUS if sign == "+" else MINUS)
        lines.append(phrase.format(a=total, b=number, c=_marked(found)))
        total = found
    return " ".join(lines)


def written_legs(entry: Entry, choose: random.Random) -> str:
    """Return an answer to ``leg_counting`` that writes each product and each sum."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    total, lines = 0, []
    for animal, count in entry["metadata"]["animals"].items():
        legs = ANIMALS[animal]
        product = count * legs
        phrase = choose.choice(LEGS)
        told = _marked(product)
        lines.append(phrase.format(animal=animal, legs=legs, count=count, product=told))
        if len(lines) > 1:
            told = _marked(total + product)
            lines.append(choose.choice(PLUS).format(a=total, b=product, c=told))
        total += product
    return " ".join(lines)


def _marked(number: int) -> str:
    return f"{MARK}{number}{MARK}"


@dataclass(frozen=True)
class Task:
    """A dataset of reasoning-gym."""

    name: str
    """By which reasoning-gym knows it."""
    settings: Mapping[str, Any]
    """Of the dataset."""
    tokens_in: int
    """Most tokens of a prompt in SmolLM2's chat template."""
    tokens_out: int
    """Most tokens of an answer; longer ones are cut, and a demonstration has fewer."""
    written: Callable[[Entry, random.Random], str]
    """Steps of a demonstration, with their results marked."""


TASKS = {
    "sums": Task(
        "chain_sum",
        {"min_terms": 52, "max_terms": 56, "min_digits": 1, "max_digits": 1},
        tokens_in=256,
        tokens_out=768,
        written=written_sum,
    ),
    "legs": Task(
        "leg_counting",
        {"min_animals": 3, "max_animals": 6, "min_instances": 2, "max_instances": 15},
        tokens_in=192,
        tokens_out=320,
        written=written_legs,
    ),
}
"""``sums`` is the one with long answers, of 520 to 620 tokens. Terms of two digits, 44 to 48 of
them, took too long to learn: an expected accuracy of 0.06 after 337 steps of the warm start."""


def entries(task: Task, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the first items of a task's dataset, as a function of the arguments alone.

    Args:
        task: one of :data:`TASKS`.
        split: key of :data:`SPLITS`.
        count: number of items.
    """
    import reasoning_gym

    settings = {"seed": SPLITS[split], "size": count}
    dataset = reasoning_gym.create_dataset(task.name, **settings, **task.settings)
    return (dataset[i] for i in range(count))


def prompt(entry: Entry) -> str:
    """Return what the user asks."""
    return entry["question"] + ASK


def demonstration(
    task: Task, entry: Entry, choose: random.Random
) -> tuple[str, list[tuple[int, int]]]:
    """Return a right answer in random sentences, and where its results begin and end."""
    marked = f"{task.written(entry, choose)} <answer>{MARK}{entry['answer']}{MARK}</answer>"
    text, spans = "", []
    for i, part in enumerate(marked.split(MARK)):
        if i % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def problems(task: Task, split: str, count: int) -> Iterator[Problem]:
    """Yield prompts, each with what reasoning-gym's scorer needs as JSON."""
    for entry in entries(task, split, count):
        known = {"answer": entry["answer"], "metadata": entry["metadata"]}
        yield Problem(prompt(entry), json.dumps(known))


def is_repeated(tokens: Sequence[int]) -> bool:
    """Tell whether a group of tokens comes again and again (:data:`REPEATED`)."""
    for period in range(1, PERIOD + 1):
        least = max(REPEATED * period, REPEATED_TOKENS) - period
        run = 0
        for before, token in zip(tokens, tokens[period:], strict=False):
            run = run + 1 if before == token else 0
            if run >= least:
                return True
    return False


def has_non_words(text: str) -> bool:
    """Tell whether many words of a text (:data:`NON_WORDS`) are none of English."""
    found = [word.lower() for word in _WORD.findall(text)]
    known = _words()
    unknown = sum(word not in known and not _is_inflected(word) for word in found)
    foreign = sum(not character.isascii() for character in text)
    return unknown + foreign > NON_WORDS * max(1, len(found))


def _is_inflected(word: str) -> bool:
    stems = [word.removesuffix(ending) for ending in _ENDINGS if word.endswith(ending)]
    return any(stem in _words() or f"{stem}e" in _words() for stem in stems)


@cache
def _words() -> frozenset[str]:
    """Return reasoning-gym's list of English words of 3 to 10 letters, in small letters."""
    from reasoning_gym.data import get_data_file_path

    text = Path(str(get_data_file_path("words3to10.txt"))).read_text(encoding="utf-8")
    return frozenset(text.lower().split())

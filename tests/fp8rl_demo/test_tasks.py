from __future__ import annotations

import math
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8rl.errors import OptionError
from fp8rl_demo import tasks


def test_problems_are_right_and_disjoint() -> None:
    train, validation = tasks.load_problems("train"), tasks.load_problems("validation")
    prompts = [p.prompt for p in train + validation]
    assert len(set(prompts)) == len(prompts)
    assert len(train) >= 1000
    assert len(validation) >= 200
    for problem in train + validation:
        # Independent truth: Python's own arithmetic on the prompt.
        assert problem.answer == str(eval(problem.prompt.removesuffix("=")))
        assert int(problem.answer) >= 0


@given(st.integers(1, 40), st.integers(0, 2**32), st.integers(1, 17))
def test_batches_are_a_pure_function_and_a_stream_of_epochs(size: int, seed: int, n: int) -> None:
    problems = [tasks.Problem(f"{i}+0=", str(i)) for i in range(n)]
    batches = [tasks.sample_batch(problems, size, seed=seed, step=s) for s in range(4)]
    assert batches[3] == tasks.sample_batch(problems, size, seed=seed, step=3)
    assert {len(batch) for batch in batches} == {size}
    stream = [problem for batch in batches for problem in batch]
    for start in range(0, len(stream) - n + 1, n):
        assert set(stream[start : start + n]) == set(problems)


def task_of(name: str = "sums", **options: Any) -> tasks.Task:
    return tasks.load_task(name, options, in_words=True)


def test_sums_in_words_are_the_same_problems_and_the_last_number_counts() -> None:
    task = task_of()
    for plain, worded in zip(tasks.load_problems("train"), task.train, strict=True):
        expression = worded.prompt.removeprefix("What is ").partition("?")[0]
        assert expression.replace(" ", "") == plain.prompt.removesuffix("=")
        assert worded.answer == plain.answer
    problem = tasks.Problem("", "45")
    texts = {"45": 1.0, "It is 45.": 1.0, "37 + 8 = 45": 1.0, "45 or 46": 0.0, "145": 0.0, "": 0.0}
    assert {text: task.score(problem, text) for text in texts} == texts


def test_problems_of_reasoning_gym_are_scored_by_its_verifier() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "reasoning_gym", None)
        with pytest.raises(OptionError, match="not installed; run pip install reasoning-gym, or g"):
            task_of("gcd")
    pytest.importorskip("reasoning_gym")
    task = task_of("gcd", max_value=30)
    prompts = [p.prompt for p in (*task.train, *task.validation)]
    assert len(set(prompts)) == len(prompts)
    for problem in task.train[:50]:
        numbers = re.findall(r"\d+", problem.prompt.partition("\n")[0])
        assert int(problem.answer) == math.gcd(*map(int, numbers))
        assert task.score(problem, f"I think <answer>{problem.answer}</answer>") == 1.0
        assert task.score(problem, problem.answer) == 0.0  # not where it was asked for
        assert task.score(problem, "<answer>0</answer>") < 1.0
    with pytest.raises(OptionError, match="cannot make 'gcd'"):
        task_of("gcd", size_of=3)
    with pytest.raises(OptionError, match="cannot make 'no such task'"):
        task_of("no such task")

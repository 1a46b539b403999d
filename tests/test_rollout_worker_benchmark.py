"""``benchmarks/rollout_worker.py``: how it tells steps apart, and the time in which a GPU works.

The worker itself runs on a GPU alone; its engine counts here, and what torch's profiler found is
given.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support.benchmarks import imported

TOKENS = 40


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("rollout_worker", monkeypatch)


class Engine:
    """Stands for vLLM's engine: a step collects garbage where it is told to."""

    vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))

    def __init__(self, collects: bool) -> None:
        self.steps, self.collects = 0, collects

    def step(self) -> list[int]:
        self.steps += 1
        if self.collects:
            circle: list[object] = []
            circle.append(circle)
            del circle
            gc.collect(1)
        return [self.steps]


class Worker:
    """Stands for NeMo RL's worker, whose rollout makes a step for each token."""

    def __init__(self, collects: bool = False) -> None:
        self.cfg = {"max_new_tokens": TOKENS}
        self.llm = SimpleNamespace(llm_engine=Engine(collects), collective_rpc=self.call)
        self.called: list[tuple[str, int]] = []

    def generate(self, data: object) -> None:
        for _ in range(TOKENS):
            self.llm.llm_engine.step()

    def call(self, function: Callable[..., Any]) -> list[Any]:
        self.called.append((function.__name__, self.llm.llm_engine.steps))
        if function.__name__ == "start_profiler":
            return [None]
        spans = [("a", 0.0, 60.0), ("b", 40.0, 100.0), ("a", 150.0, 200.0)]
        return [(spans, {"cudaEventSynchronize": [10, 37.0]})]


@pytest.mark.parametrize("collects", [True, False])
def test_steps_are_told_apart_and_the_engine_is_left_as_it_was(
    benchmark: ModuleType, collects: bool
) -> None:
    worker = Worker(collects)
    callbacks = list(gc.callbacks)
    found = benchmark.in_steps(worker, None)
    assert found["steps"] == worker.llm.llm_engine.steps == TOKENS
    assert len(found["step_ms_by_tenth"]) == 10
    assert 0 < found["in_steps_seconds"] < found["seconds"]
    of_steps = found["collections"].get(1, {"count": 0, "freed": 0})
    assert of_steps["count"] >= (TOKENS if collects else 0)
    assert of_steps["freed"] >= (TOKENS if collects else 0)
    assert "step" not in vars(worker.llm.llm_engine)
    assert gc.callbacks == callbacks


def test_answers_that_are_too_short_for_a_profile_are_refused(benchmark: ModuleType) -> None:
    worker = Worker()
    worker.cfg = {"max_new_tokens": 2 * benchmark.PROFILED - 2}
    with pytest.raises(ValueError, match="needs answers of 20 tokens; these have 18"):
        benchmark.profiled(worker, None)
    assert not worker.called


def test_a_profile_counts_what_overlaps_once(benchmark: ModuleType) -> None:
    worker = Worker()
    found = benchmark.a_step(benchmark.profiled(worker, None))
    half = TOKENS // 2
    assert worker.called == [("start_profiler", half), ("stop_profiler", half + benchmark.PROFILED)]
    assert found["gpu_busy_us"] == pytest.approx(150 / benchmark.PROFILED)
    assert found["gpu_span_us"] == pytest.approx(200 / benchmark.PROFILED)
    assert found["kernels_us"] == pytest.approx({"a": 11.0, "b": 6.0})
    assert found["step_us_under_profiler"] > 0
    assert "step" not in vars(worker.llm.llm_engine)

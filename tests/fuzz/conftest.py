"""Engines, length and counts of the fuzz; ``make fuzz`` sets ``FUZZ_EXAMPLES``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.models import MODELS, Live

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


@pytest.fixture(scope="package")
def budget() -> Callable[[int], settings]:
    """``budget(short)``: settings of a test that has ``short`` examples in ``make slow``."""

    def of(short: int) -> settings:
        return settings(
            max_examples=EXAMPLES or short,
            stateful_step_count=12 if EXAMPLES else 6,
            derandomize=not EXAMPLES,
            deadline=None,
            print_blob=True,
            # A short slice that fails says so at once; the long run looks for the least example.
            phases=tuple(Phase) if EXAMPLES else (Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )

    return of


@pytest.fixture(scope="session")
def counts() -> Iterator[Counter[str]]:
    """What was tried; written as JSON to the file that ``FUZZ_COUNTS`` names."""
    counter: Counter[str] = Counter()
    yield counter
    if path := os.environ.get("FUZZ_COUNTS"):
        Path(path).write_text(json.dumps(dict(counter)), encoding="utf-8")


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """``live(name)``: the one engine of a model of :data:`support.models.MODELS`."""
    from vllm.distributed import parallel_state

    started: dict[str, Live] = {}
    before = parallel_state._EP

    def start(name: str) -> Live:
        if name not in started:
            if MODELS[name].experts and parallel_state.model_parallel_is_initialized():
                # vLLM makes this group with the first engine of a process, if that has experts.
                parallel_state._EP = before or parallel_state.get_tp_group()
            folder = tmp_path_factory.mktemp("fuzz") / name
            started[name] = Live(MODELS[name], MODELS[name].start(folder))
        return started[name]

    yield start
    parallel_state._EP = before

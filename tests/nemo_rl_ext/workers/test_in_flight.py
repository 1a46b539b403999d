"""Refits of an asynchronous worker with requests in flight, on an engine that says what it is told.

The answers of a real one: test_self_calibration.py; what vLLM does when it is asked to pause, to
empty its cache and to go on: tests/vllm_fp8rl/refit/sender/.
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fp8rl.errors import RefitError
from nemo_rl_ext.workers.in_flight import RefitInFlight


class Engine:
    """The calls that a refit makes of an ``AsyncLLM``, in their order."""

    def __init__(self, answers: dict[str, Any], cache: str, paused: bool = False) -> None:
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=cache))
        self.answers, self.paused, self.asked = answers, paused, ""

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        assert mode == "keep" and not clear_cache
        self.asked, self.paused = self.asked + "pause ", True

    async def resume_generation(self) -> None:
        self.asked, self.paused = self.asked + "resume ", False

    async def reset_prefix_cache(self, **options: bool) -> bool:
        assert options == {"reset_running_requests": True, "reset_connector": True}
        return self.answer("reset")

    async def collective_rpc(self, method: str) -> list[bool]:
        return [method == "may_run", self.answer(method)]  # of two ranks

    def answer(self, call: str) -> bool:
        self.asked += f"{call} "
        if isinstance(self.answers[call], Exception):
            raise self.answers[call]
        return bool(self.answers[call])


def worker_of(engine: Engine) -> RefitInFlight:
    class Upstream:
        async def update_weights_from_collective_async(self) -> bool:
            return engine.answer("update")

        update_weights_via_ipc_zmq_async = update_weights_from_collective_async

    class Worker(RefitInFlight, Upstream):
        llm = engine

    return Worker()


@pytest.mark.parametrize("transport", ["via_ipc_zmq", "from_collective"])
@pytest.mark.parametrize(
    ("cache", "paused", "answers", "asked"),
    [
        ("fp8_e4m3", False, [True, False, None], "pause update kv_codes_outdated resume"),
        ("fp8_e4m3", False, [True, True, None], "pause update kv_codes_outdated reset resume"),
        ("fp8_e4m3", False, [False, None, True], "pause update may_run resume"),
        ("fp8_e4m3", True, [True, False, None], "update kv_codes_outdated"),
        ("auto", False, [True, None, None], "update"),
    ],
    ids=["same scales", "a new scale", "failed before a write", "paused before", "BF16 cache"],
)
def test_requests_go_on_after_a_refit(
    transport: str, cache: str, paused: bool, answers: list[Any], asked: str
) -> None:
    """And compute their keys again, where a scale has changed."""
    update, outdated, may_run = answers
    given = {"update": update, "kv_codes_outdated": outdated, "may_run": may_run, "reset": True}
    engine = Engine(given, cache, paused)
    refit = getattr(worker_of(engine), f"update_weights_{transport}_async")
    assert asyncio.run(refit()) is update
    assert (engine.asked.strip(), engine.paused) == (asked, paused)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"update": False, "may_run": False}, None),
        ({"update": False, "may_run": RuntimeError("lost")}, None),
        ({"update": ValueError("first")}, ValueError),
        ({"update": True, "kv_codes_outdated": RuntimeError("lost")}, RuntimeError),
        ({"update": True, "kv_codes_outdated": True, "reset": ValueError("first")}, ValueError),
        ({"update": True, "kv_codes_outdated": True, "reset": False}, RefitError),
    ],
)
def test_an_engine_that_may_not_run_stays_paused_until_a_refit_succeeds(
    answers: dict[str, Any], error: type[Exception] | None
) -> None:
    """Naively it would be resumed, and its next step would end its core."""
    engine = Engine(answers, "fp8_e4m3")
    worker: Any = worker_of(engine)
    with pytest.raises(error) if error else nullcontext():
        assert asyncio.run(worker.update_weights_from_collective_async()) is False
    assert engine.paused
    answers.update(update=True, kv_codes_outdated=False)
    assert asyncio.run(worker.update_weights_from_collective_async()) is True
    assert not engine.paused

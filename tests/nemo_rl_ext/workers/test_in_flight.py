"""Refits of an asynchronous worker with requests in flight, in a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8rl.errors import RefitError
from nemo_rl_ext.workers.in_flight import RefitInFlight
from support.processes import answer, run_forked
from support.tiny import make_checkpoint

SCRIPT = Path(__file__).with_name("in_flight_cases.py")
LENGTH = 120


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, seed)
    return answer(run_forked(SCRIPT, root, timeout=240))


def test_requests_go_on_where_no_scale_has_changed_or_a_refit_failed_before_its_first_write(
    found: dict[str, Any],
) -> None:
    assert found["same"] == [True, found["a"]]
    assert found["unchanged"] == [False, found["a"]]


def test_an_engine_that_was_paused_stays_paused(found: dict[str, Any]) -> None:
    assert (found["by_ipc"], found["still_paused"]) == (True, True)
    assert found["a_again"] == found["a"]


def test_where_a_scale_grows_requests_compute_their_keys_again(found: dict[str, Any]) -> None:
    old_tokens, rest_is_of_the_new_weights = found["split"]
    assert found["grown"] is True
    assert 5 <= old_tokens < LENGTH
    assert rest_is_of_the_new_weights is True


def test_after_a_refit_that_broke_off_the_engine_pauses_until_the_next_one(
    found: dict[str, Any],
) -> None:
    """Naively it would be resumed, and its next step would end its core."""
    assert found["broken_off"] == [False, True, False]
    assert found["mended"] == [True, False, found["a"]]


class Engine:
    """The calls that a refit makes, where the worker processes answer as they are told."""

    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="fp8_e4m3"))

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.paused = answers, False

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self, **options: bool) -> bool:
        return self._answer("reset")

    async def collective_rpc(self, method: str) -> list[bool]:
        return [self._answer(method)]

    def _answer(self, call: str) -> bool:
        if isinstance(self.answers[call], Exception):
            raise self.answers[call]
        return bool(self.answers[call])


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"update": False, "may_run": RuntimeError("lost")}, None),
        ({"update": ValueError("first")}, ValueError),
        ({"update": True, "kv_codes_outdated": RuntimeError("lost")}, RuntimeError),
        ({"update": True, "kv_codes_outdated": True, "reset": ValueError("first")}, ValueError),
        ({"update": True, "kv_codes_outdated": True, "reset": False}, RefitError),
    ],
)
def test_an_engine_that_may_not_run_is_not_resumed(
    answers: dict[str, Any], error: type[Exception] | None
) -> None:
    class Upstream:
        llm = Engine(answers)

        async def update_weights_from_collective_async(self) -> bool:
            return self.llm._answer("update")

    class Worker(RefitInFlight, Upstream):
        pass

    worker = Worker()
    with pytest.raises(error) if error else nullcontext():
        assert asyncio.run(worker.update_weights_from_collective_async()) is False
    assert worker.llm.paused
    answers.update(update=True, kv_codes_outdated=False)
    assert asyncio.run(worker.update_weights_from_collective_async()) is True
    assert not worker.llm.paused

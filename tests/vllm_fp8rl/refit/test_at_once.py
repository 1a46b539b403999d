"""Two changes of one engine at once: the second is refused and does the first no harm."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.errors import Fp8RLError, RefitError

pytest.importorskip("vllm")
from support.engine import SCALES, VOCAB, Engine, load_tensors
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.refit import drop_requests, refit
from vllm_fp8rl.refit.receiver.worker import STEPS, read_answer
from vllm_fp8rl.refit.sender.client import Workers

PROMPTS = [[(31 * i + 7 * j) % (VOCAB - 5) + 5 for j in range(20 + 9 * i)] for i in range(3)]
pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def weights(checkpoints: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_tensors(path) | SCALES for name, path in checkpoints.items()}


def served(engine: Engine) -> list[list[int]] | None:
    """Tokens of the prompts; None where the engine refuses."""
    try:
        return engine.greedy(PROMPTS)
    except Fp8RLError:
        drop_requests(engine.llm)
        return None


def test_while_observing_the_engine_is_shut(engine: Engine) -> None:
    """Whoever only observes, by ``fp8rl_observe_kv``, must not serve with provisional scales."""
    before = served(engine)
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    read_answer(STEPS["fp8rl_observe_kv"](worker, {}))
    try:
        engine.refuses(RefitError, "being calibrated")
    finally:
        read_answer(STEPS["fp8rl_stop_observing_kv"](worker))
    drop_requests(engine.llm)
    assert served(engine) == before


def test_others_are_refused_during_a_calibration(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    generate = engine.llm.generate

    def with_another(*args: Any, **options: Any) -> Any:
        def other() -> None:
            try:
                engine.llm.llm_engine.add_request("other", {"prompt_token_ids": [5]}, options)
            except RefitError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return generate(*args, **options)

    monkeypatch.setattr(engine.llm, "generate", with_another)
    calibrate_kv_scales(engine.llm, PROMPTS)
    assert refused and all("being calibrated" in error for error in refused)


def test_the_second_of_two_refits_does_not_end_the_first(engine: Engine, weights: dict) -> None:
    second: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights["b"].items()):
            if number == 3:
                thread = threading.Thread(target=another)
                thread.start()
                thread.join()
            yield item

    def another() -> None:
        try:
            refit(engine.llm, weights["a"].items(), expect_kv_scales=True)
        except RefitError as error:
            second.append(str(error))

    report = refit(engine.llm, stream(), expect_kv_scales=True, batch_bytes=1)
    assert report.kv_scales == len(SCALES)
    assert second and "already under way in another thread" in second[0]


def test_nobody_aborts_the_session_of_another(engine: Engine, weights: dict) -> None:
    """An HTTP client whose ``begin`` was refused aborts, as the README tells it to."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker

    def call(step: str, *args: object) -> Any:
        return read_answer(STEPS[f"fp8rl_refit_{step}"](worker, *args))

    call("begin", "first", True)
    items = list(weights["b"].items())
    call("load_batch", "first", items[:5])
    with pytest.raises(RefitError, match=r"already under way.*fp8rl_refit_abort"):
        call("begin", "second", True)
    assert call("abort", "second", "my begin was refused")  # shut, by the first
    for step in (("load_batch", "second", items[5:]), ("finish", "second")):
        with pytest.raises(RefitError, match="another name than the one given") as error:
            call(*step)
        assert "first" not in str(error.value)
    call("load_batch", "first", items[5:])
    assert call("finish", "first")["kv_scales"] == len(SCALES)
    assert not call("abort", "first", "too late")
    call("begin", "gone", True)
    with pytest.raises(RefitError, match=r"label '[0-9a-f]{12}'") as error:
        refit(engine.llm, items, expect_kv_scales=True)
    assert "gone" not in str(error.value).replace("is gone", "")
    (label,) = re.findall("label '([0-9a-f]{12})'", str(error.value))
    for step in (("load_batch", label, items[5:]), ("finish", label), ("outdates_cache", label)):
        with pytest.raises(RefitError, match="another name than the one given"):
            call(*step)
    assert call("abort", label, "its sender died") is False
    refit(engine.llm, items, expect_kv_scales=True)
    with pytest.raises(RefitError, match=r"takes the name of the session.*True and None"):
        call("begin", True, None)


def test_a_refit_refused_for_requests_in_flight_does_nothing(
    engine: Engine, weights: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    live = engine.llm.llm_engine
    own = live.add_request
    monkeypatch.setattr(live, "add_request", own)  # as of somebody who counts requests
    monkeypatch.setattr(live, "has_unfinished_requests", lambda: True)
    monkeypatch.setattr(Workers, "call", lambda workers, step, *args: calls.append(step))
    with pytest.raises(RefitError, match="has requests in flight"):
        refit(engine.llm, weights["b"].items(), expect_kv_scales=True)
    assert calls == []
    assert vars(live)["add_request"] is own

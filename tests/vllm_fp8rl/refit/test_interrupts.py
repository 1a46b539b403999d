"""Ctrl-C, once and twice, at any point of a refit or a calibration, and two changes at once.

Afterwards the engine serves the old or the new weights and KV scales as a whole, or refuses, and
the next change works at once.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import vllm_fp8rl
from fp8rl.errors import Fp8RLError, RefitError

pytest.importorskip("vllm")
from support.engine import KV_SCALE, SCALES, VOCAB, Engine, load_tensors
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.kv_observer import ObservedImpl
from vllm_fp8rl.kv_scales import fp8_layers
from vllm_fp8rl.refit import RefitSession, drop_requests, refit
from vllm_fp8rl.refit.client import Workers
from vllm_fp8rl.refit.worker import STEPS, read_answer

PROMPTS = [[(31 * i + 7 * j) % (VOCAB - 5) + 5 for j in range(20 + 9 * i)] for i in range(3)]
pytestmark = pytest.mark.usefixtures("restored")
OURS = str(Path(vllm_fp8rl.__file__).parent)


@contextmanager
def interrupts(*places: int) -> Iterator[Callable[[], int]]:
    """Raise KeyboardInterrupt at these calls, counted from 1, of functions of this package.

    Yields:
        How many calls there have been.
    """
    count, left = 0, list(places)

    def raising(watched: int) -> Callable[[FrameType, str, object], None]:
        def called(frame: FrameType, event: str, argument: object) -> None:
            nonlocal count
            if event != "call" or not frame.f_code.co_filename.startswith(OURS):
                return
            if watched == len(places) - len(left):
                count += 1
                if left and count >= left[0]:
                    left.pop(0)
                    raise KeyboardInterrupt

        return called

    # Python takes a function away that raises, so there is one for each of two interrupts.
    before = sys.gettrace()
    sys.settrace(raising(0))
    sys.setprofile(raising(1))
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
        sys.setprofile(None)


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


def places(total: int, number: int) -> list[tuple[int, ...]]:
    """Where to interrupt once and where twice, all over ``total`` calls."""
    once = [1 + round(i * (total - 2) / (number - 1)) for i in range(number)]
    return [(at,) for at in once] + [(at, at + gap) for at in once for gap in (1, 3, 7)]


def test_an_interrupted_calibration_leaves_no_other_scales_in_service(engine: Engine) -> None:
    """Fails where provisional scales are written as if they had been loaded."""
    before = served(engine)
    scales = engine.kv_scales()
    calibrate_kv_scales(engine.llm, PROMPTS)  # the first one does a little more
    with interrupts() as calls:
        found = calibrate_kv_scales(engine.llm, PROMPTS)
        total = calls()
    send_kv_scales(engine.llm, dict.fromkeys(SCALES, KV_SCALE))
    refused = 0
    for at in places(total, 8):
        with pytest.raises(KeyboardInterrupt), interrupts(*at):
            calibrate_kv_scales(engine.llm, PROMPTS)
        tokens = served(engine)
        refused += tokens is None
        if engine.kv_scales() == scales:
            assert tokens in (before, None), at
        elif tokens is not None:  # the end had been reached
            assert found.items() <= engine.kv_scales().items(), at
        assert calibrate_kv_scales(engine.llm, PROMPTS) == found, at
        assert served(engine) is not None
        send_kv_scales(engine.llm, dict.fromkeys(SCALES, KV_SCALE))
    assert refused, "no interrupt came where the undoing is interrupted too"
    assert served(engine) == before
    assert not any(isinstance(layer.impl, ObservedImpl) for layer, _ in fp8_layers(engine.model))


def test_an_interrupted_refit_serves_old_or_new_or_refuses(engine: Engine, weights: dict) -> None:
    """Fails where a second Ctrl-C leaves the session open: "already under way"."""
    old = served(engine)
    with interrupts() as calls:
        refit(engine.llm, weights["b"].items(), expect_kv_scales=True, batch_bytes=1 << 17)
        total = calls()
    new = served(engine)
    assert old != new
    for at in places(total, 6):
        refit(engine.llm, weights["a"].items(), expect_kv_scales=True)
        with pytest.raises(KeyboardInterrupt), interrupts(*at):
            refit(engine.llm, weights["b"].items(), expect_kv_scales=True, batch_bytes=1 << 17)
        assert served(engine) in (old, new, None), at
        refit(engine.llm, weights["b"].items(), expect_kv_scales=True)
        assert served(engine) == new, at


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


def test_a_refit_refused_beside_the_session_of_another_leaves_the_gate_open(
    engine: Engine, weights: dict
) -> None:
    with RefitSession(engine.model, expect_kv_scales=True, name="first") as first:
        first.load(list(weights["b"].items()))
        with pytest.raises(RefitError, match=r"A refit was refused.*already under way"):
            refit(engine.llm, weights["a"].items(), expect_kv_scales=True)
        assert "add_request" not in vars(engine.llm.llm_engine)
        with pytest.raises(RefitError, match="a refit is under way"):  # the workers' guards refuse
            engine.greedy(PROMPTS)
        drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    assert served(engine) is not None


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


@pytest.mark.parametrize("kind", [list, iter])
def test_an_interrupted_plain_load_serves_no_mixture(engine: Engine, weights: dict, kind) -> None:
    """And leaves nothing behind on the parameters that vLLM's loader meets again."""

    def load() -> None:
        engine.model.load_weights(kind(weights["b"].items()))

    old = served(engine)
    with interrupts() as calls:
        load()
    new = served(engine)
    assert old != new
    for at in places(calls(), 8):
        refit(engine.llm, weights["a"].items(), expect_kv_scales=True)
        with interrupts(*at), suppress(KeyboardInterrupt):
            load()
        assert served(engine) in (None, old, new), at
        load()
        assert served(engine) == new, at

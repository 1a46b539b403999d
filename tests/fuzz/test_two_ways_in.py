"""Two ways in at once, in any order: what is served came whole by one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fp8rl.errors import Fp8RLError, RefitError
from support.models import MODELS, Live, differing
from support.wire import Wire, make_wire
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv import observer as kv_observer
from vllm_fp8rl.refit import RefitSession, drop_requests, refit
from vllm_fp8rl.refit.receiver.weight_transfer import _Intake
from vllm_fp8rl.refit.receiver.worker import read_answer

PARTS = 3
Way = Callable[[Live, Wire], Iterator[None]]
"""Brings a whole wire in parts; somebody else may act where it yields."""


def parts(wire: Wire) -> list[list[tuple[str, Any]]]:
    step = -(-len(wire.stream) // PARTS)
    return [wire.stream[first : first + step] for first in range(0, len(wire.stream), step)]


def by_session(live: Live, wire: Wire) -> Iterator[None]:
    with RefitSession(live.engine.model, expect_kv_scales=True) as session:
        for part in parts(wire):
            yield
            session.load(part)
        yield


def by_steps(live: Live, wire: Wire) -> Iterator[None]:
    name = f"fuzz-{id(wire)}"

    def call(step: str, *args: Any) -> None:
        for answer in live.engine.llm.collective_rpc(f"fp8rl_refit_{step}", args=(name, *args)):
            read_answer(answer)

    try:
        call("begin", True)
        for part in parts(wire):
            yield
            call("load_batch", part)
        yield
        call("finish")
    except Fp8RLError as error:
        call("abort", type(error).__name__)
        raise


def by_transfer(live: Live, wire: Wire) -> Iterator[None]:
    intake = _Intake(live.engine.model)
    intake.start()
    for part in parts(wire):
        yield
        try:
            intake.load_weights(part)
        except Fp8RLError as error:
            intake.abandon(type(error).__name__)
            raise
    yield
    intake.finish()


def by_layers(live: Live, wire: Wire) -> Iterator[None]:
    initialize_layerwise_reload(live.engine.model)
    for part in parts(wire):
        yield
        live.engine.model.load_weights(part)
    yield
    finalize_layerwise_reload(live.engine.model, live.engine.llm.llm_engine.model_config)


def at_once(give: Callable[[Any, list[tuple[str, torch.Tensor]]], object]) -> Way:
    def way(live: Live, wire: Wire) -> Iterator[None]:
        give(live.engine, wire.stream)
        yield from ()

    return way


def reload(engine: Any, tensors: Any) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})


WAYS: dict[str, Way] = {
    "session": by_session,
    "steps": by_steps,
    "weight transfer": by_transfer,
    "layerwise reload": by_layers,
    "refit": at_once(lambda engine, t: refit(engine.llm, t, expect_kv_scales=True)),
    "reload_weights": at_once(reload),
    "load_weights": at_once(lambda engine, t: engine.model.load_weights(t)),
    "load_weights of a stream": at_once(lambda engine, t: engine.model.load_weights(iter(t))),
}
STREAMS: dict[str, Callable[[Any, Iterator[tuple[str, torch.Tensor]]], object]] = {
    "refit": lambda engine, t: refit(engine.llm, t, expect_kv_scales=True, batch_bytes=1 << 15),
    "reload_weights": reload,
    "load_weights": lambda engine, t: engine.model.load_weights(t),
}
OTHERS: dict[str, Callable[[Any, list[Any]], object]] = {
    "one tensor": lambda engine, t: engine.model.load_weights(t[:1]),
    "scales": lambda engine, t: send_kv_scales(engine.llm, dict.fromkeys(kv_names(t), 0.25)),
    "calibration": lambda engine, t: calibrate_kv_scales(engine.llm, [[5, 6, 7]]),
    "observation": lambda engine, t: kv_observer.start_observing(engine.model, {}),
    "a refit by LLM": lambda engine, t: refit(engine.llm, t, expect_kv_scales=True),
}


def kv_names(stream: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in stream if name.endswith(("k_scale", "v_scale"))]


def alone(first: str, second: str) -> bool:
    """Whether senders can be told apart: vLLM's layerwise reload has plain loads and no names."""
    plain = {"layerwise reload", "load_weights", "load_weights of a stream"}
    return "layerwise reload" not in (first, second) or not {first, second} <= plain


@pytest.mark.parametrize("name", ["qwen3"])
def test_what_is_served_came_whole_by_one_way(
    name: str,
    live: Callable[[str], Live],
    budget: Callable[[int], settings],
    counts: Counter[str],
) -> None:
    started, model = live(name), MODELS[name]
    llm = started.engine.llm
    old, *new = (make_wire(model, s, codes=False, kv_scales=True, calm=True) for s in (1, 2, 3))

    def whole() -> None:
        drop_requests(llm)
        refit(llm, list(old.stream), expect_kv_scales=True)
        assert differing(started.weights(), model.held(old.sent())) == []

    pairs = [(one, other) for one in WAYS for other in WAYS if alone(one, other)]

    @settings(parent=budget(20))
    @given(ways=st.sampled_from(pairs), turns=st.lists(st.integers(0, 1), max_size=2 * PARTS + 4))
    def interleaved(ways: tuple[str, str], turns: list[int]) -> None:
        whole()
        drivers = [WAYS[way](started, wire) for way, wire in zip(ways, new, strict=True)]
        last, ended = old, [False, False]
        for turn in [*turns, *[0] * (PARTS + 3), *[1] * (PARTS + 3)]:
            if ended[turn]:
                continue
            try:
                next(drivers[turn])
            except StopIteration:
                last, ended[turn] = new[turn], True
            except RefitError:
                counts["two ways at once: one refused"] += 1
                ended[turn] = True
            drop_requests(llm)
            if started.serves() is not None:
                assert differing(started.weights(), model.held(last.sent())) == []
        assert ended == [True, True]
        counts["two ways at once"] += 1
        whole()

    interleaved()

    @settings(parent=budget(15))
    @given(
        way=st.sampled_from(sorted(STREAMS)),
        others=st.lists(
            st.tuples(st.integers(0, len(new[0].stream)), st.sampled_from(sorted(WAYS | OTHERS))),
            min_size=1,
            max_size=3,
        ),
    )
    def nested(way: str, others: list[tuple[int, str]]) -> None:
        whole()

        def stream() -> Iterator[tuple[str, Any]]:
            for place in range(len(new[0].stream) + 1):
                for other in (other for at, other in others if at == place):
                    counts["ways within a stream"] += 1
                    with pytest.raises(RefitError):
                        enter(other)
                yield from new[0].stream[place : place + 1]

        def enter(other: str) -> None:
            if other in OTHERS:
                OTHERS[other](started.engine, new[1].stream)
            else:
                for _ in WAYS[other](started, new[1]):
                    pass

        with pytest.raises(RefitError):  # weights fall asleep under no load, and end a refit
            STREAMS[way](started.engine, asleep(iter(new[0].stream)))
        STREAMS[way](started.engine, stream())
        drop_requests(llm)
        assert started.serves() is not None
        assert differing(started.weights(), model.held(new[0].sent())) == []
        assert started.scales() == new[0].kv_scales

    def asleep(stream: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        guard = state_of(started.engine.model).guard
        yield next(stream)
        guard.sleep(["weights"], {})  # a CPU has no sleep mode: as its backend tells it
        guard.wake(None)
        yield from stream

    nested()
    whole()

"""Refits of live engines by any stream: the weights that were sent, the old ones, or a refusal."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from fp8rl.errors import Fp8RLError
from fp8rl.plugins.hookspecs import RefitReport
from support.models import MODELS, Live, differing
from support.wire import FAULTS, SenderDied, Wire, items, make_wire, refilled, spoil
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.refit import drop_requests, refit

DOORS = ("collection", "generator", "refilled buffer")
PROMPT = [(7 * i) % 120 + 5 for i in range(200)]
"""More than a block of the KV cache."""


def through(door: str, live: Live, wire: Wire, batch_bytes: int | None) -> RefitReport:
    """Send a wire."""
    stream: Any = items(wire)
    if door == "collection" and "a sender that dies" not in wire.faults:
        stream = list(wire.stream)
    elif door == "refilled buffer":
        stream, batch_bytes = refilled(wire), None
    announced = bool(wire.kv_scales)
    return refit(live.engine.llm, stream, expect_kv_scales=announced, batch_bytes=batch_bytes)


def machine(live: Live, counts: Counter[str]) -> type[RuleBasedStateMachine]:
    """Any order of refits, calibrations and requests of one engine."""

    said: list[Any] = []

    class Refits(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.weights: Any = None
            """Of the last complete refit: what the engine may serve."""
            self.scales: dict[str, float] = {}
            self.torn = False
            """A refit broke off that had brought some KV scales."""
            self.pointers: dict[str, int] = {}

        @initialize(seed=st.integers(0, 3))
        def begin(self, seed: int) -> None:
            drop_requests(live.engine.llm)
            self.pointers = live.pointers()
            self._succeeds(make_wire(live.model, seed, codes=False, kv_scales=True), "collection")

        @rule(
            seed=st.integers(0, 2**32 - 1),
            codes=st.booleans(),
            kv_scales=st.booleans(),
            faults=st.lists(st.sampled_from(sorted(FAULTS)), max_size=2),
            door=st.sampled_from(DOORS),
            batch_bytes=st.sampled_from((1, 1 << 15, 1 << 17, 1 << 30)),
        )
        def refit(
            self, seed: int, codes: bool, kv_scales: bool, faults: Any, door: str, batch_bytes: int
        ) -> None:
            wire = make_wire(live.model, seed, codes, kv_scales)
            rng = random.Random(seed)
            for name in faults:
                spoil(wire, name, rng)
            if not wire.faults:
                self._succeeds(wire, door, batch_bytes)
                return
            counts["streams that must be refused"] += 1
            with pytest.raises((Fp8RLError, SenderDied)):
                through(door, live, wire, batch_bytes)
            self._old_or_closed()

        def _succeeds(self, wire: Wire, door: str, batch_bytes: int = 1 << 17) -> None:
            counts["refits that must succeed"] += 1
            try:
                report = through(door, live, wire, batch_bytes)
            except Fp8RLError:
                # A sender that spoils what it has sent may be refused, and where an earlier refit
                # has left its KV scales behind, one without any.
                assert door == "refilled buffer" or (self.torn and not wire.kv_scales)
                self._old_or_closed()
                return
            expected = live.model.held(wire.sent())
            assert differing(live.weights(), expected) == []
            assert report.tensors == len(wire.stream)
            assert report.received_bytes == sum(t.nbytes for _, t in wire.stream)
            assert report.kv_scales == len(wire.kv_scales)
            assert live.pointers() == self.pointers
            if wire.kv_scales:
                self.scales, self.torn = wire.kv_scales, False
            self.weights = expected
            if self.torn and live.serves() is None:  # it waits for scales
                return
            assert live.cached_tokens(PROMPT) == 0, "keys of the old weights are in use"
            assert live.cached_tokens(PROMPT) > 0
            self._whole()

        def _old_or_closed(self) -> None:
            if live.serves() is None:
                self.torn = True
            else:
                self._whole()

        def _whole(self) -> None:
            assert live.serves() is not None
            assert differing(live.weights(), self.weights) == []
            assert live.scales() == self.scales

        @rule(value=st.sampled_from((0.02, 0.5)))
        def send_scales(self, value: float) -> None:
            scales = {name: value * (1 + i) for i, name in enumerate(live.scales())}
            try:
                send_kv_scales(live.engine.llm, scales)
            except Fp8RLError:
                self._old_or_closed()
                return
            self.scales = {name: torch.tensor(s).item() for name, s in scales.items()}
            self.torn = False
            self._old_or_closed()

        @rule(margin=st.sampled_from((1.0, 1.5)))
        def calibrate(self, margin: float) -> None:
            counts["calibrations"] += 1
            try:
                found = calibrate_kv_scales(live.engine.llm, [PROMPT, PROMPT[:7]], margin=margin)
            except Fp8RLError:  # closed, or weights that make no finite keys
                self._old_or_closed()
                return
            self.torn = False
            self.scales = {name: s for name, s in found.items() if name in self.scales}
            self._whole()

        def teardown(self) -> None:
            """Whatever has happened, the next complete refit serves, and as the first did."""
            drop_requests(live.engine.llm)
            wire = make_wire(live.model, 1, codes=False, kv_scales=True)
            self._succeeds(wire, "collection")
            live.engine.llm.reset_prefix_cache()
            said.append(live.serves())
            assert said[-1] == said[0]

    return Refits


@pytest.mark.parametrize("name", MODELS)
def test_any_stream_is_complete_or_refused(name, live, budget, counts):
    run_state_machine_as_test(machine(live(name), counts), settings=budget(5))

"""Refits of live engines by any stream: the weights that were sent, the old ones, or a refusal."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from safetensors.torch import save_file

from fp8rl.errors import Fp8RLError
from support.models import MODELS, Live, differing
from support.wire import FAULTS, NOT_IN_FILES, SenderDied, Wire, items, make_wire, refilled, spoil
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.refit import drop_requests, refit, refit_from_files

OUTER = ("collection", "generator", "refilled buffer", "files")
"""Doors that take the ``LLM``; after a failure it refuses requests itself until one succeeds."""
INNER = ("rpc",)
"""Doors to the workers, of which the ``LLM`` knows nothing."""
PROMPT = [(7 * i) % 120 + 5 for i in range(200)]
"""More than a block of the KV cache."""


def through(door: str, live: Live, wire: Wire, batch_bytes: int, rng: random.Random) -> Any:
    """Send a wire; the report, a RefitReport or a dict of its fields."""
    llm, announced = live.engine.llm, wire.announced and "announced: False" not in wire.faults
    if door == "collection" and "a sender that dies" not in wire.faults:
        return refit(llm, list(wire.stream), expect_kv_scales=announced, batch_bytes=batch_bytes)
    if door == "refilled buffer":
        return refit(llm, refilled(wire), expect_kv_scales=announced)
    if door == "files" and not NOT_IN_FILES & set(wire.faults):
        with tempfile.TemporaryDirectory() as folder:
            for number, batch in enumerate(_batches(wire, rng)):
                tensors = {name: tensor.contiguous() for name, tensor in batch}
                save_file(tensors, Path(folder, f"{number}.safetensors"))
            return refit_from_files(llm, folder, expect_kv_scales=announced)
    if door == "rpc":
        return _by_steps(live, wire, announced, rng)
    return refit(llm, items(wire), expect_kv_scales=announced, batch_bytes=batch_bytes)


def _batches(wire: Wire, rng: random.Random) -> list[list[tuple[str, Any]]]:
    stream = list(items(wire)) or [("model.nothing", torch.ones(1))]
    cuts = sorted(rng.sample(range(1, len(stream)), min(len(stream) - 1, rng.randrange(6))))
    return [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


def _by_steps(live: Live, wire: Wire, announced: bool, rng: random.Random) -> Any:
    """As a server's client does it, which gives up its own session after an error."""
    from vllm_fp8rl.refit.receiver.worker import read_answer

    llm, session = live.engine.llm, f"fuzz-{rng.random()}"

    def call(step: str, *args: Any) -> Any:
        (answer,) = llm.collective_rpc(f"fp8rl_refit_{step}", args=(session, *args))
        return read_answer(answer)

    try:
        call("begin", announced)
        for batch in _batches(wire, rng):
            call("load_batch", batch)
        report = call("finish")
    except Exception as error:
        call("abort", type(error).__name__)
        raise
    llm.reset_prefix_cache()
    return report


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
            self.doors = OUTER

        @initialize(seed=st.integers(0, 3), doors=st.sampled_from((OUTER, INNER)))
        def begin(self, seed: int, doors: tuple[str, ...]) -> None:
            self.doors = doors
            drop_requests(live.engine.llm)
            self.pointers = live.pointers()
            self._succeeds(make_wire(live.model, seed, codes=False, kv_scales=True), "collection")

        @rule(
            seed=st.integers(0, 2**32 - 1),
            codes=st.booleans(),
            kv_scales=st.booleans(),
            faults=st.lists(st.sampled_from(sorted(FAULTS)), max_size=2),
            door=st.integers(0, 3),
            batch_bytes=st.sampled_from((1, 1 << 15, 1 << 17, 1 << 30)),
        )
        def refit(
            self,
            seed: int,
            codes: bool,
            kv_scales: bool,
            faults: list[str],
            door: int,
            batch_bytes: int,
        ) -> None:
            chosen = self.doors[door % len(self.doors)]
            wire = make_wire(live.model, seed, codes, kv_scales)
            rng = random.Random(seed)
            for name in faults:
                spoil(wire, name, rng)
            if wire.faults:
                self._fails(wire, chosen, batch_bytes, rng)
            else:
                self._succeeds(wire, chosen, batch_bytes, rng)

        def _succeeds(
            self,
            wire: Wire,
            door: str,
            batch_bytes: int = 1 << 17,
            rng: random.Random | None = None,
        ) -> None:
            counts["refits that must succeed"] += 1
            try:
                report = through(door, live, wire, batch_bytes, rng or random.Random(0))
            except Fp8RLError:
                # A sender that spoils what it has sent may be refused, and where an earlier refit
                # has left its KV scales behind, one without any.
                assert door == "refilled buffer" or (self.torn and not wire.kv_scales)
                self._old_or_closed()
                return
            told = report if isinstance(report, dict) else vars(report)
            expected = live.model.held(wire.sent())
            assert differing(live.weights(), expected) == []
            assert told["tensors"] == len(wire.stream)
            assert told["received_bytes"] == sum(t.nbytes for _, t in wire.stream)
            assert told["kv_scales"] == len(wire.kv_scales)
            assert live.pointers() == self.pointers
            if wire.kv_scales:
                self.scales, self.torn = wire.kv_scales, False
            self.weights = expected
            if self.torn and live.serves() is None:  # it waits for scales
                return
            assert live.cached_tokens(PROMPT) == 0, "keys of the old weights are in use"
            assert live.cached_tokens(PROMPT) > 0
            self._whole()

        def _fails(self, wire: Wire, door: str, batch_bytes: int, rng: random.Random) -> None:
            counts["streams that must be refused"] += 1
            with pytest.raises((Fp8RLError, SenderDied)):
                through(door, live, wire, batch_bytes, rng)
            self._old_or_closed()

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
            wire = make_wire(live.model, 1, codes=False, kv_scales=True, calm=True)
            self._succeeds(wire, "collection")
            live.engine.llm.reset_prefix_cache()
            said.append(live.serves())
            assert said[-1] == said[0]

    return Refits


@pytest.mark.parametrize("name", MODELS)
def test_any_stream_is_complete_or_refused(name, live, budget, counts):
    run_state_machine_as_test(machine(live(name), counts), settings=budget(5))

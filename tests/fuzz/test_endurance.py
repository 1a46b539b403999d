"""Many refits of an engine leave nothing behind; an engine that is killed is noticed."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from pathlib import Path

import pytest

from fp8rl.errors import Fp8RLError
from support.engine import make_checkpoint
from support.models import MODELS
from support.processes import run_script
from support.wire import make_wire
from vllm_fp8rl.calibration import calibrate_kv_scales
from vllm_fp8rl.refit import refit

LONG = "FUZZ_EXAMPLES" in os.environ
WARM, REFITS = (60, 400) if LONG else (30, 40)
ALLOWED = 2 << 20
"""Bytes that they may leave. If each left a copy of the model, which is tiny: 40 MB."""
KILLS = int(os.environ.get("FUZZ_KILLS", "0"))
PROMPT = [(7 * i) % 120 + 5 for i in range(40)]


def held_by_this_process() -> dict[str, int]:
    """Resident bytes with nothing left to give back, open files and threads."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - one of them is this listing
        "threads": threading.active_count(),
    }


def test_refits_leave_nothing_behind(live, counts):
    """Whole ones, broken ones, calibrations and requests."""
    started, model = live("qwen3"), MODELS["qwen3"]
    llm = started.engine.llm
    wires = [make_wire(model, s, codes=s == 2, kv_scales=True) for s in (1, 2)]

    def one(number: int) -> None:
        wire = wires[number % 2]
        if number % 10 == 5:
            with pytest.raises(Fp8RLError):
                refit(llm, wire.stream[:-1], expect_kv_scales=True)
        if number % 10 == 7:
            calibrate_kv_scales(llm, [PROMPT])
        refit(llm, iter(wire.stream), expect_kv_scales=True, batch_bytes=1 << 15)
        if number % 3 == 0:
            assert started.serves() is not None

    for number in range(WARM):
        one(number)
    before = held_by_this_process()
    for number in range(REFITS):
        one(number)
    after = held_by_this_process()
    counts["refits without growth"] += REFITS
    counts["refits without growth: bytes left"] += max(0, after["bytes"] - before["bytes"])
    assert after["bytes"] - before["bytes"] < ALLOWED
    assert after["files"] <= before["files"]
    assert after["threads"] <= before["threads"]


@pytest.mark.skipif(not KILLS, reason="each takes the start of an engine: make fuzz")
def test_engine_cores_that_are_killed(tmp_path, counts):
    """SIGKILL in the middle of a refit; the caller gets an error, not a wait."""
    make_checkpoint(tmp_path / "a", 0)
    script = Path(__file__).with_name("kill_cases.py")
    for _ in range(KILLS):
        (tmp_path / "delay").write_text(str(random.uniform(0.0, 0.3)))
        found = run_script(script, tmp_path, timeout=300)
        assert found["error"].startswith("RefitError: Step "), found
        assert "restart the engine" in found["error"]
        assert found["afterwards"] != "none", found
        counts["engine cores killed"] += 1

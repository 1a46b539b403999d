"""Ctrl-C, once or twice, at any point of a refit, a plain load or a calibration.

Python looks for signals where a function begins and where a C function has returned: an interrupt
is raised there, by a profile function that counts those points, so that an example can be repeated.

None is raised where vLLM's scheduler, engine and model runner keep their books of requests, nor
between the forward and the sampling of a step. vLLM does not undo there what it is in the middle
of: blocks or requests stay that nobody knows, and from then on it refuses to empty its prefix
cache, so that every refit is refused; or it refuses every step. The engine must be started again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from support.models import MODELS, Live, differing
from support.wire import Wire, items, make_wire
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.refit import drop_requests, refit, refit_from_files

PROMPTS = [[(7 * i) % 120 + 5 for i in range(40)], [9] * 20]


class Interrupts:
    """Raises KeyboardInterrupt at chosen points, each counted from the one before."""

    def __init__(self, llm: Any, *gaps: int) -> None:
        self._runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.points = 0
        """How many were passed."""
        self.raised = 0
        self._gaps = list(gaps)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_return", "c_exception"):
            return
        due = self._gaps and self._gaps[0] == 0
        if due and self._runner.execute_model_state is None and not _in_the_books(frame):
            del self._gaps[0]
            self.raised += 1
            self._again()
            raise KeyboardInterrupt
        self.points += 1
        if self._gaps and self._gaps[0]:
            self._gaps[0] -= 1

    def _again(self) -> None:
        """Python takes a profile function away that raises; the trace function puts it back."""
        if self._gaps:
            sys.settrace(self._back)

    def _back(self, frame: FrameType, event: str, argument: object) -> None:
        sys.settrace(None)
        sys.setprofile(self)

    def during(self, action: Callable[..., Any], *arguments: Any) -> Any:
        """Do something under interrupts; none comes after it."""
        try:
            sys.setprofile(self)
            return action(*arguments)
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            torch.set_grad_enabled(True)  # torch's own no_grad may have been left half way


BOOKS = (
    "/vllm/v1/core/",
    "/vllm/v1/engine/",
    "/vllm/v1/worker/gpu_model_runner",
    "/vllm/v1/worker/gpu_input_batch",
    "/_pytest/unraisableexception",
)
CARRIERS = ("/vllm/v1/executor/", "/vllm/v1/worker/")  # of a step, or of a call to the workers
OTHERS = ("/vllm_fp8rl/", "/vllm/model_executor/", "/vllm/entrypoints/", __file__)


def _in_the_books(frame: FrameType | None) -> bool:
    """Whether vLLM changes its books of requests, or pytest notes what a finalizer raises."""
    carried = False
    while frame is not None:
        path = frame.f_code.co_filename
        if any(part in path for part in OTHERS):
            return False
        if carried:
            if "/vllm/v1/engine/core" in path and frame.f_code.co_name == "step":
                return True
        elif any(part in path for part in BOOKS):
            return True
        elif any(part in path for part in CARRIERS):
            carried = True
        frame = frame.f_back
    return False


ACTIONS: dict[str, Callable[[Live, Wire, Path], Any]] = {
    "refit": lambda live, wire, saved: refit(
        live.engine.llm, items(wire), expect_kv_scales=True, batch_bytes=1 << 16
    ),
    "refit from files": lambda live, wire, saved: refit_from_files(
        live.engine.llm, str(saved), expect_kv_scales=True
    ),
    "load_weights": lambda live, wire, saved: live.engine.model.load_weights(items(wire)),
    "calibration": lambda live, wire, saved: calibrate_kv_scales(live.engine.llm, PROMPTS),
    "scales": lambda live, wire, saved: send_kv_scales(live.engine.llm, wire.kv_scales),
}


@pytest.mark.parametrize(
    ("name", "action"), [*(("qwen3", action) for action in ACTIONS), ("qwen3_moe", "refit")]
)
def test_old_or_new_or_a_refusal(name, action, live, budget, counts, tmp_path):
    started, act = live(name), ACTIONS[action]
    llm = started.engine.llm
    old, new = (make_wire(MODELS[name], s, False, True) for s in (1, 2))
    save_file(new.sent(), tmp_path / "model.safetensors")
    of_old, of_new = (MODELS[name].held(wire.sent()) for wire in (old, new))

    def whole() -> None:
        drop_requests(llm)
        refit(llm, list(old.stream), expect_kv_scales=True)
        assert started.serves() == said_by_old
        assert differing(started.weights(), of_old) == []
        assert started.scales() == old.kv_scales

    refit(llm, list(old.stream), expect_kv_scales=True)
    said_by_old = started.serves()
    found = calibrate_kv_scales(llm, PROMPTS)
    calibrated = {name: scale for name, scale in found.items() if name in old.kv_scales}
    allowed = [
        (of_old, old.kv_scales),
        {
            "calibration": (of_old, calibrated),
            "scales": (of_old, new.kv_scales),
        }.get(action, (of_new, new.kv_scales)),
    ]
    whole()
    counting = Interrupts(llm)
    counting.during(act, started, new, tmp_path)
    whole()

    @settings(parent=budget(6))
    @given(
        first=st.integers(0, counting.points - 1),
        second=st.one_of(st.none(), st.integers(0, 40), st.integers(0, 400)),
    )
    def interrupted(first: int, second: int | None) -> None:
        whole()  # an example that failed before this one has left anything behind
        interrupts = Interrupts(llm, first, *([] if second is None else [second]))
        try:
            interrupts.during(act, started, new, tmp_path)
        except KeyboardInterrupt:
            counts[f"interrupted: {action}"] += 1
            counts["interrupts"] += interrupts.raised
            counts["interrupts, twice"] += interrupts.raised == 2
        drop_requests(llm)
        if started.serves() is not None:
            held, scales = started.weights(), started.scales()
            assert any(
                not differing(held, weights) and scales == of_them for weights, of_them in allowed
            ), f"neither the old nor the new, but scales {scales}"
        whole()

    interrupted()

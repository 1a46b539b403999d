"""Worker steps by ``collective_rpc`` in any order, with any arguments, from several sessions.

A step must answer with an error of ours, and the engine must stay whole: what it serves is what a
complete refit has brought.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import errors
from support.models import MODELS, Live, differing
from support.wire import make_wire
from vllm_fp8rl.refit import drop_requests, refit
from vllm_fp8rl.refit.receiver.worker import STEPS as NAMES

SESSIONS = ("one", "two")
TEXTS = ("", "one", "model.norm.weight", "\0", "x" * 300)
"""Any of them may become the name of a session too."""
STEPS = {
    "fp8rl_refit_begin": 2,
    "fp8rl_refit_place": 0,
    "fp8rl_refit_load_batch": 2,
    "fp8rl_refit_load_files": 2,
    "fp8rl_refit_outdates_cache": 1,
    "fp8rl_refit_finish": 1,
    "fp8rl_refit_abort": 2,
    "fp8rl_refit_check": 0,
    "fp8rl_set_kv_scales": 1,
    "fp8rl_missing_kv_scales": 0,
    "fp8rl_observe_kv": 1,
    "fp8rl_admit_kv_calibration": 1,
    "fp8rl_observed_kv": 0,
    "fp8rl_stop_observing_kv": 0,
}
"""Method -> how many arguments it has; those of a refit have the session's name first."""

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(width=32),
    st.sampled_from(TEXTS),
    st.binary(max_size=4),
    st.just(torch.ones(3)),
)
junk = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.lists(st.tuples(scalars, scalars), max_size=2),
    st.dictionaries(st.sampled_from(("tensors", "storages", "model.norm.weight")), scalars),
)
names = st.sampled_from(
    ("model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.attn.v_scale", "k_scale")
)
scales = st.dictionaries(names, st.one_of(scalars, st.just(0.1)), max_size=2)


def files(kind: str, folder: Path) -> str:
    """A path that a client may give by mistake."""
    path = folder / "weights.safetensors"
    if kind == "text":
        path.write_text("no tensors")
    elif kind == "header without an end":
        path.write_bytes(b"\xff" * 64)
    elif kind == "empty file":
        path.touch()
    return str(folder if kind == "folder" else path)


Call = tuple[str, list[Any]]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    method = draw(st.sampled_from(sorted(STEPS)))
    arguments: list[Any] = [draw(junk) for _ in range(STEPS[method])]
    if method.startswith("fp8rl_refit") and arguments and draw(st.integers(0, 4)):
        arguments[0] = draw(st.sampled_from(SESSIONS))
    if method.endswith("begin") and draw(st.booleans()):
        arguments[1] = draw(st.booleans())
    if method.endswith("load_files") and draw(st.integers(0, 3)):
        kinds = ("text", "header without an end", "empty file", "folder", "nothing")
        arguments[1] = draw(st.sampled_from(kinds))
    if method.endswith("load_batch") and draw(st.booleans()):
        arguments[1] = "some of the weights"
    if method.startswith("fp8rl_admit"):  # a client that admits requests is calibrating
        arguments = [draw(st.sampled_from((None, False, 0, "", {})))]
    if method in ("fp8rl_set_kv_scales", "fp8rl_observe_kv") and draw(st.booleans()):
        arguments[0] = draw(scales)
    return method, arguments


def test_every_step_is_called_here() -> None:
    assert set(STEPS) == set(NAMES)


@pytest.mark.parametrize("name", ["qwen3"])
def test_answers_are_errors_and_the_engine_stays_whole(
    name: str,
    live: Callable[[str], Live],
    budget: Callable[[int], settings],
    counts: Counter[str],
    tmp_path: Path,
) -> None:
    started = live(name)
    llm, model = started.engine.llm, MODELS[name]
    old, new = (make_wire(model, s, False, True, calm=True) for s in (1, 2))
    held = model.held(old.sent())

    def call(method: str, arguments: list[Any]) -> dict[str, Any]:
        if method.endswith("load_files") and isinstance(arguments[1], str):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            arguments = [arguments[0], files(arguments[1], folder)]
        elif arguments and isinstance(arguments[-1], str) and "some of" in arguments[-1]:
            arguments = [arguments[0], new.stream[:7]]
        (answer,) = llm.collective_rpc(method, args=tuple(arguments))
        assert answer.keys() == {"value", "error"}
        if answer["error"] is not None:
            kind, message = answer["error"]
            assert issubclass(getattr(errors, kind), errors.Fp8RLError)
            assert message.strip() and answer["value"] is None
        counts["calls of worker steps"] += 1
        counts["calls of worker steps, refused"] += answer["error"] is not None
        return answer

    def whole() -> None:
        for session in {*SESSIONS, *TEXTS}:
            call("fp8rl_refit_abort", [session, "the fuzz goes on"])
        call("fp8rl_stop_observing_kv", [])
        drop_requests(llm)
        refit(llm, list(old.stream), expect_kv_scales=True)
        assert started.serves() is not None
        assert differing(started.weights(), held) == []
        assert started.scales() == old.kv_scales

    @settings(parent=budget(15))
    @given(sequence=st.lists(calls(), min_size=1, max_size=8))
    def check(sequence: list[Call]) -> None:
        whole()
        expected = dict(old.kv_scales)
        for method, arguments in sequence:
            answer = call(method, arguments)
            if method == "fp8rl_set_kv_scales" and answer["error"] is None:
                expected |= {
                    name.replace(".attn.", "."): torch.tensor(float(value)).item()
                    for name, value in arguments[0].items()
                }
            if started.serves() is not None:
                assert differing(started.weights(), held) == []
                assert started.scales() == expected
        whole()

    check()

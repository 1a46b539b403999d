"""Worker steps by ``collective_rpc`` in any order, with any arguments, from several sessions.

A step must answer with an error of ours, and the engine must stay whole: what it serves is what a
complete refit has brought.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8rl import errors
from support.models import MODELS, Live, differing
from support.wire import make_wire
from vllm_fp8rl.refit import drop_requests, refit
from vllm_fp8rl.refit.receiver.worker import STEPS

SESSIONS = ("one", "two", "", "model.norm.weight", "\0", "x" * 300)
FALSE = st.sampled_from((None, False, 0, "", {}))
KINDS = (
    *(st.none(), st.booleans(), st.integers(-2, 2), st.floats(width=32), st.binary(max_size=4)),
    *(st.sampled_from(SESSIONS), st.just(torch.ones(3))),
)
SCALES = st.dictionaries(
    st.sampled_from(("model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.attn.v_scale")),
    st.one_of(st.just(0.1), *KINDS),
    max_size=2,
)


def values(batch: Any, folder: Path) -> st.SearchStrategy[Any]:
    """Arguments of a step; ``batch`` is some of the weights, the folder has files to be damaged."""
    (folder / "text").write_text("no tensors")
    (folder / "no end").write_bytes(b"\xff" * 64)
    (folder / "empty").touch()
    paths = [str(path) for path in (folder, folder / "nothing", *folder.iterdir())]
    scalars = st.one_of(*KINDS)
    pairs = st.lists(st.tuples(scalars, scalars), max_size=2)
    named = st.dictionaries(st.sampled_from(("tensors", "storages")), scalars)
    return st.one_of(
        scalars, SCALES, st.just(batch), st.sampled_from(paths), pairs, named, st.booleans()
    )


@st.composite
def calls(draw: st.DrawFn, argument: st.SearchStrategy[Any]) -> tuple[str, list[Any]]:
    method = draw(st.sampled_from(sorted(STEPS)))
    arguments = [draw(argument) for _ in range(len(signature(STEPS[method]).parameters) - 1)]
    if method.startswith("fp8rl_refit") and arguments and draw(st.integers(0, 4)):
        arguments[0] = draw(st.sampled_from(SESSIONS[:2]))
    if method.startswith("fp8rl_admit"):  # a client that admits requests is calibrating
        arguments = [draw(FALSE)]
    return method, arguments


def test_answers_are_errors_and_the_engine_stays_whole(
    live: Callable[[str], Live],
    budget: Callable[[int], settings],
    counts: Counter[str],
    tmp_path: Path,
) -> None:
    started, model = live("qwen3"), MODELS["qwen3"]
    llm = started.engine.llm
    old, new = (make_wire(model, s, False, True, calm=True) for s in (1, 2))
    held = model.held(old.sent())

    def call(method: str, *arguments: Any) -> bool:
        """Whether the step answers with a value."""
        (answer,) = llm.collective_rpc(method, args=arguments)
        assert answer.keys() == {"value", "error"}
        if answer["error"] is not None:
            kind, message = answer["error"]
            assert issubclass(getattr(errors, kind), errors.Fp8RLError)
            assert message.strip() and answer["value"] is None
        counts["calls of worker steps"] += 1
        counts["calls of worker steps, refused"] += answer["error"] is not None
        return answer["error"] is None

    def whole() -> None:
        for session in SESSIONS:
            call("fp8rl_refit_abort", session, "the fuzz goes on")
        call("fp8rl_stop_observing_kv")
        drop_requests(llm)
        refit(llm, list(old.stream), expect_kv_scales=True)
        holds(old.kv_scales)
        assert started.serves() is not None

    def holds(scales: dict[str, float]) -> None:
        assert differing(started.weights(), held) == []
        assert started.scales() == scales

    @settings(parent=budget(15))
    @given(sequence=st.lists(calls(values(new.stream[:7], tmp_path)), min_size=1, max_size=8))
    def check(sequence: list[tuple[str, list[Any]]]) -> None:
        whole()
        expected = dict(old.kv_scales)
        for method, arguments in sequence:
            if call(method, *arguments) and method == "fp8rl_set_kv_scales":
                for name, value in arguments[0].items():
                    expected[name.replace(".attn.", ".")] = torch.tensor(float(value)).item()
            if started.serves() is not None:
                holds(expected)
        whole()

    check()

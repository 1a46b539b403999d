"""Two ways in at once: while one is open, each other one is refused, and the first is complete."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from fp8rl.errors import RefitError
from support.engine import KV_SCALE, PROMPTS, SCALES
from support.reloads import reload
from vllm_fp8rl.calibration import calibrate_kv_scales, send_kv_scales
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv import observer as kv_observer
from vllm_fp8rl.kv.scales import set_kv_scales
from vllm_fp8rl.refit import RefitSession, drop_requests, refit, refit_from_files
from vllm_fp8rl.refit.receiver.weight_transfer import Fp8RLNcclTransferEngine
from vllm_fp8rl.refit.receiver.worker import STEPS, read_answer

pytestmark = pytest.mark.usefixtures("restored")
NORM = "model.norm.weight"


def weight_transfer(engine: Any) -> None:
    config = engine.llm.llm_engine.vllm_config
    transfer = Fp8RLNcclTransferEngine(None, config, torch.device("cpu"), engine.model)
    transfer.start_weight_update()
    transfer.raise_error()


ENTRIES: dict[str, Callable[[Any, dict, Any], Any]] = {
    "refit": lambda e, t, path: refit(e.llm, t.items(), expect_kv_scales=False),
    "files": lambda e, t, path: refit_from_files(e.llm, path, expect_kv_scales=False),
    "session": lambda e, t, path: RefitSession(e.model, expect_kv_scales=None).__enter__(),
    "weight transfer": lambda e, t, path: weight_transfer(e),
    "reload_weights": lambda e, t, path: reload(e, t.items()),
    "layerwise reload": lambda e, t, path: initialize_layerwise_reload(e.model),
    "load_weights": lambda e, t, path: e.model.load_weights(list(t.items())),
    "load_weights of one": lambda e, t, path: e.model.load_weights([(NORM, t[NORM])]),
    "load_weights of a stream": lambda e, t, path: e.model.load_weights(iter(t.items())),
    "load_weights of a part": lambda e, t, path: e.model.model.load_weights(
        iter([("norm.weight", t[NORM])])
    ),
    "send_kv_scales": lambda e, t, path: send_kv_scales(e.llm, dict.fromkeys(SCALES, 0.5)),
    "set_kv_scales": lambda e, t, path: set_kv_scales(e.model, dict.fromkeys(SCALES, 0.5)),
    "calibrate": lambda e, t, path: calibrate_kv_scales(e.llm, PROMPTS),
    "observe": lambda e, t, path: kv_observer.start_observing(e.model, {}),
}


@pytest.fixture(scope="module")
def other(b, tmp_path_factory) -> tuple[dict[str, torch.Tensor], str]:
    """Weights that no engine here shall ever serve, and a file of them."""
    wrong = {name: torch.ones_like(tensor) for name, tensor in b.items()}
    path = tmp_path_factory.mktemp("other") / "model.safetensors"
    save_file(wrong, path)
    return wrong, str(path)


def try_all(engine: Any, other: Any, names: Iterable[str] = ENTRIES) -> None:
    """Each other way in, which must be refused."""
    for name in names:
        with pytest.raises(RefitError, match=r"under way|is writing to this model"):
            ENTRIES[name](engine, *other)


def serves(engine: Any, expected: Any) -> bool:
    drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    held = {round(scale, 6) for scale in engine.kv_scales().values()}
    return engine.greedy(PROMPTS) == expected and held == {KV_SCALE}


def test_beside_a_refit(engine, b, tokens, other):
    with RefitSession(engine.model, expect_kv_scales=None) as session:
        try_all(engine, other)  # before its first tensor
        session.load(list(b.items())[:5])
        try_all(engine, other)
        session.load(list(b.items())[5:])
        try_all(engine, other)
    assert serves(engine, tokens["b"])


@pytest.mark.parametrize("way", ["load_weights", "reload_weights", "layerwise reload"])
def test_beside_a_stream_that_is_being_loaded(engine, b, tokens, other, way):
    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        """Other ways are tried before the first tensor, between two, and after the last."""
        for number, item in enumerate(b.items()):
            if number in (0, 7):
                try_all(engine, other)
            yield item
        try_all(engine, other)

    if way == "reload_weights":
        reload(engine, stream())
    elif way == "load_weights":
        engine.model.load_weights(stream())
    else:  # its own tensors come by ``load_weights``; and it may be begun again
        initialize_layerwise_reload(engine.model)
        names = [n for n in ENTRIES if n != "layerwise reload" and not n.startswith("load_weights")]
        try_all(engine, other, names)
        engine.model.load_weights(stream())
        finalize_layerwise_reload(engine.model, engine.llm.llm_engine.model_config)
    assert serves(engine, tokens["b"])


def in_a_thread(run: Callable[[], object]) -> str:
    """Run in another thread, and return the RefitError that it raises."""
    said: list[str] = []

    def caught() -> None:
        try:
            run()
        except RefitError as error:
            said.append(str(error))

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    return "".join(said)


def test_the_second_of_two_refits_does_not_end_the_first(engine, b, tokens, other):
    second: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(b.items()):
            if number == 3:
                second.append(in_a_thread(lambda: ENTRIES["refit"](engine, *other)))
            yield item

    refit(engine.llm, stream(), expect_kv_scales=False, batch_bytes=1)
    assert "already under way in another thread" in second[0]
    assert serves(engine, tokens["b"])


def test_while_observing_the_engine_is_shut(engine, tokens):
    """Whoever only observes, by ``fp8rl_observe_kv``, must not serve with provisional scales."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    read_answer(STEPS["fp8rl_observe_kv"](worker, {}))
    engine.refuses(RefitError, "being calibrated")
    read_answer(STEPS["fp8rl_stop_observing_kv"](worker))
    assert serves(engine, tokens["a"])


@pytest.mark.parametrize("name", ["session", "load_weights", "reload_weights", "set_kv_scales"])
def test_a_calibration_ends_where_weights_or_scales_come(engine, a, name):
    kv_observer.start_observing(engine.model, {})
    if name == "session":
        with RefitSession(engine.model, expect_kv_scales=None) as session:
            session.load(list(a.items()))
    elif name == "set_kv_scales":
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        read_answer(STEPS["fp8rl_set_kv_scales"](worker, dict.fromkeys(SCALES, KV_SCALE)))
    else:
        ENTRIES[name](engine, a, "")
    with pytest.raises(RefitError, match="No KV scales are being observed"):
        kv_observer.observed(engine.model)


def test_nobody_goes_on_with_or_aborts_the_session_of_another(engine, b):
    """An HTTP client whose ``begin`` was refused aborts, as the guide tells it to."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker

    def call(step: str, *args: object) -> Any:
        return read_answer(STEPS[f"fp8rl_refit_{step}"](worker, *args))

    items = list((b | SCALES).items())
    call("begin", "first", True)
    call("load_batch", "first", items[:5])
    with pytest.raises(RefitError, match=r"already under way.*fp8rl_refit_abort") as begun:
        call("begin", "second", True)
    (label,) = re.findall("label '([0-9a-f]{12})'", str(begun.value))
    assert call("abort", "second", "my begin was refused")  # shut, by the first
    for step in ("load_batch", items[5:]), ("finish",), ("outdates_cache",):
        for stranger in ("second", label):
            with pytest.raises(RefitError, match="another name than the one given") as error:
                call(step[0], stranger, *step[1:])
            assert "first" not in str(error.value)
    call("load_batch", "first", items[5:])
    assert call("finish", "first")["kv_scales"] == len(SCALES)
    assert not call("abort", "first", "too late")
    call("begin", "gone", True)
    with pytest.raises(RefitError, match=r"label '[0-9a-f]{12}'") as error:
        refit(engine.llm, items, expect_kv_scales=True)
    (label,) = re.findall("label '([0-9a-f]{12})'", str(error.value))
    assert call("abort", label, "its sender died") is False
    refit(engine.llm, items, expect_kv_scales=True)
    with pytest.raises(RefitError, match=r"takes the name of the session.*True and None"):
        call("begin", True, None)


def test_a_sleep_is_refused_under_a_load_and_ends_a_refit(engine, b, tokens):
    """A CPU has no sleep mode: the guard is told as its backend does."""
    guard = state_of(engine.model).guard
    first, *rest = b.items()

    def stream():
        yield first
        with pytest.raises(RefitError, match="A sleep was refused"):
            guard.sleep(["weights"], {})
        yield from rest

    engine.model.load_weights(stream())
    assert serves(engine, tokens["b"])
    session = RefitSession(engine.model, expect_kv_scales=None).__enter__()
    session.load([first])
    guard.sleep(["weights", "kv_cache"], {})
    guard.wake(None)
    with pytest.raises(RefitError, match=r"This refit is not open.* begin a new one"):
        session.load(rest)
    engine.refuses(RefitError, "half-updated: a refit broke off")

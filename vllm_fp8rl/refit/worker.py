"""The workers' side: steps as functions, and as a mixin for ``worker_extension_cls``.

A step returns plain data, also for an error: a multiprocess executor turns an exception of a worker
into a RuntimeError without its type, and an engine core in a process of its own decodes builtins
only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch

from fp8rl import errors
from fp8rl.errors import Fp8RLError, RefitError
from vllm_fp8rl.calibration import observer as kv_observer
from vllm_fp8rl.quantization import kv_cache
from vllm_fp8rl.refit import transport
from vllm_fp8rl.refit.files import read_files
from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
from vllm_fp8rl.refit.liveness import lost_worker
from vllm_fp8rl.refit.session import RefitSession
from vllm_fp8rl.refit.transport import Payload, Place
from vllm_fp8rl.state import state_of

logger = logging.getLogger("vllm.fp8rl")

EXTENSION = "vllm_fp8rl.refit.worker.RefitWorker"
"""For ``LLM(worker_extension_cls=...)``; needed where the engine core runs in its own process."""

Answer = dict[str, Any]
"""``value`` of a step, or ``error``: the class name in :mod:`fp8rl.errors` and the message."""


def read_answer(answer: Answer) -> Any:
    """The value of a step.

    Raises:
        Fp8RLError: what the step raised on the worker, of the same class.
    """
    if answer["error"] is None:
        return answer["value"]
    kind, message = answer["error"]
    raise getattr(errors, kind)(message)


def _answers(step: Callable[..., Any]) -> Callable[..., Answer]:
    @wraps(step)
    def answering(worker: Any, *args: Any) -> Answer:
        try:
            return {"value": step(worker.model_runner.get_model(), *args), "error": None}
        except Fp8RLError as error:
            return {"value": None, "error": (type(error).__name__, str(error))}
        except Exception as error:
            logger.exception("A step of a refit failed.")
            return {
                "value": None,
                "error": (RefitError.__name__, str(lost_worker(step.__name__, error))),
            }

    return answering


def _open_session(model: torch.nn.Module, name: str) -> RefitSession:
    session = state_of(model).guard.session
    if session is None:
        raise RefitError("No refit is under way on this worker; begin one first.")
    if session.name != name:
        raise RefitError(f"The refit under way on this worker is '{session.name}', not '{name}'.")
    assert isinstance(session, RefitSession)
    return session


@_answers
def begin(model: torch.nn.Module, session: str, expect_kv_scales: bool) -> None:
    """Open a session.

    Args:
        model: of this rank.
        session: a name that no other sender uses; the other steps take it too, so that nobody
            goes on with, finishes or aborts the refit of another.
        expect_kv_scales: see :class:`~vllm_fp8rl.refit.session.RefitSession`.
    """
    if not isinstance(session, str) or not isinstance(expect_kv_scales, bool):
        raise RefitError(
            "fp8rl_refit_begin takes the name of the session (a string) and whether KV scales come "
            f"(a boolean), not {session!r} and {expect_kv_scales!r}."
        )
    RefitSession(model, expect_kv_scales=expect_kv_scales, name=session).__enter__()


@_answers
def place(model: torch.nn.Module) -> Place:
    """Where this worker is; see :mod:`vllm_fp8rl.refit.transport`."""
    return transport.place()


@_answers
def load_batch(
    model: torch.nn.Module, session: str, batch: Payload | list[tuple[str, torch.Tensor]]
) -> None:
    """Load tensors, or what :meth:`vllm_fp8rl.refit.transport.Sender.wrap` made of them."""
    opened = _open_session(model, session)
    if isinstance(batch, list):
        opened.load(batch)
        return
    with transport.received(batch) as tensors:
        opened.load(tensors.items())


@_answers
def load_files(model: torch.nn.Module, session: str, path: str) -> None:
    """Load a safetensors file, or all of a folder, a batch at a time."""
    tensors = read_files(path)  # first, since all ranks take part in it
    opened = _open_session(model, session)
    for batch in batches(tensors, BATCH_BYTES):
        opened.load(batch)


@_answers
def finish(model: torch.nn.Module, session: str) -> dict[str, Any]:
    """Verify that the refit is complete and let the model run; the report as a dict.

    Unless the KV cache was emptied meanwhile, the model waits until it is: it may hold keys of the
    old weights.
    """
    opened = _open_session(model, session)
    opened.__exit__(None, None, None)
    assert opened.report is not None
    state_of(model).guard.outdate_cache("keys of older weights")
    return asdict(opened.report)


@_answers
def abort(model: torch.nn.Module, session: str, reason: str) -> bool:
    """Give up a session if it is open; whether the model now refuses to run."""
    guard = state_of(model).guard
    if guard.session is not None and guard.session.name == session:
        guard.session.abandon(reason)
    return guard.closed


@_answers
def check(model: torch.nn.Module) -> None:
    """Whether a step could run now."""
    state_of(model).guard.require_ready()


@_answers
def set_kv_scales(model: torch.nn.Module, scales: dict[str, float]) -> None:
    """End a calibration, if any, and set scales; see :func:`vllm_fp8rl.quantization.kv_cache.set_kv_scales`.

    The model refuses to run until the caller has emptied the prefix cache.
    """
    kv_cache.set_kv_scales(model, scales)
    kv_observer.stop_observing(model)


@_answers
def missing_kv_scales(model: torch.nn.Module) -> list[str]:
    """See :func:`vllm_fp8rl.quantization.kv_cache.missing_kv_scales`."""
    return kv_cache.missing_kv_scales(model)


@_answers
def observe_kv(model: torch.nn.Module, provisional: dict[str, float]) -> None:
    """See :func:`vllm_fp8rl.calibration.observer.start_observing`."""
    kv_observer.start_observing(model, provisional)


@_answers
def admit_calibration(model: torch.nn.Module, admitted: bool) -> None:
    """See :func:`vllm_fp8rl.calibration.observer.admit_calibration`."""
    kv_observer.admit_calibration(model, admitted)


@_answers
def observed_kv(model: torch.nn.Module) -> dict[str, Any]:
    """See :func:`vllm_fp8rl.calibration.observer.observed`."""
    return kv_observer.observed(model)


@_answers
def stop_observing_kv(model: torch.nn.Module) -> None:
    """See :func:`vllm_fp8rl.calibration.observer.stop_observing`."""
    kv_observer.stop_observing(model)


STEPS: dict[str, Callable[..., Answer]] = {
    "place": place,
    "begin": begin,
    "load_batch": load_batch,
    "load_files": load_files,
    "finish": finish,
    "abort": abort,
    "check": check,
    "set_kv_scales": set_kv_scales,
    "missing_kv_scales": missing_kv_scales,
    "observe_kv": observe_kv,
    "admit_kv_calibration": admit_calibration,
    "observed_kv": observed_kv,
    "stop_observing_kv": stop_observing_kv,
}
METHODS = {
    step: f"fp8rl_{step}" if "kv" in step else f"fp8rl_refit_{step}"  # as RefitMixin has them
    for step in STEPS
}
NEED_IDLE = frozenset(METHODS[step] for step in ("begin", "set_kv_scales", "observe_kv"))
"""Methods that change what requests in flight depend on; see :mod:`vllm_fp8rl.patches.engine_core`."""


def refusal(method: str) -> Answer:
    """The answer of a step that was not run because requests are in flight."""
    error = (
        f"{method} was refused because the engine has requests in flight; wait for them, or pause "
        "generation first."
    )
    return {"value": None, "error": (RefitError.__name__, error)}


def cache_emptied(worker: Any) -> None:
    """Note on a worker that its engine core has emptied the KV cache."""
    state_of(worker.model_runner.get_model()).guard.cache_emptied()


def weights_going(worker: Any) -> None:
    """Shut the model before vLLM's ``reset_weights``."""
    state_of(worker.model_runner.get_model()).guard.close("vLLM is resetting the weights")


def weights_gone(worker: Any) -> None:
    """Wait for every weight after vLLM's ``reset_weights``, as after a level-2 sleep."""
    from vllm_fp8rl.patches.sleep import discardable

    model = worker.model_runner.get_model()
    guard = state_of(model).guard
    guard.sleep(["weights"], dict(discardable(model)))
    guard.wake(["weights"])
    guard.open()


class RefitMixin:
    """The steps as methods of a vLLM worker; put it before other bases of your own extension."""

    def fp8rl_refit_begin(self, session: str, expect_kv_scales: bool) -> Answer:
        return begin(self, session, expect_kv_scales)

    def fp8rl_refit_place(self) -> Answer:
        return place(self)

    def fp8rl_refit_load_batch(
        self, session: str, batch: Payload | list[tuple[str, torch.Tensor]]
    ) -> Answer:
        return load_batch(self, session, batch)

    def fp8rl_refit_load_files(self, session: str, path: str) -> Answer:
        return load_files(self, session, path)

    def fp8rl_refit_finish(self, session: str) -> Answer:
        return finish(self, session)

    def fp8rl_refit_abort(self, session: str, reason: str) -> Answer:
        return abort(self, session, reason)

    def fp8rl_refit_check(self) -> Answer:
        return check(self)

    def fp8rl_set_kv_scales(self, scales: dict[str, float]) -> Answer:
        return set_kv_scales(self, scales)

    def fp8rl_missing_kv_scales(self) -> Answer:
        return missing_kv_scales(self)

    def fp8rl_observe_kv(self, provisional: dict[str, float]) -> Answer:
        return observe_kv(self, provisional)

    def fp8rl_admit_kv_calibration(self, admitted: bool) -> Answer:
        return admit_calibration(self, admitted)

    def fp8rl_observed_kv(self) -> Answer:
        return observed_kv(self)

    def fp8rl_stop_observing_kv(self) -> Answer:
        return stop_observing_kv(self)


class RefitWorker(RefitMixin):
    """``worker_extension_cls`` for engines that need no other extension."""


def has_refit_methods(extension: str) -> bool:
    """Whether a ``worker_extension_cls`` (a qualified name, or empty) has :class:`RefitMixin`."""
    if not extension:
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return issubclass(resolve_obj_by_qualname(extension), RefitMixin)

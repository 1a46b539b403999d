"""The steps of a refit and of a calibration that run in a worker: :class:`RefitMixin`.

The mixin is the one list of steps. Engines whose core has a process of its own call its methods by
name (``worker_extension_cls``); for the others the client sends the same functions (:data:`STEPS`).

A step returns plain data, also for an error: a multiprocess executor turns an exception of a worker
into a RuntimeError without its type, and an engine core in a process of its own decodes builtins
only.
"""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch

from fp8rl import errors
from fp8rl.errors import Fp8RLError, RefitError
from vllm_fp8rl.engine.guard import RefitGuard
from vllm_fp8rl.engine.names import EXTENSION
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv import observer as kv_observer
from vllm_fp8rl.kv import scales as kv_scales
from vllm_fp8rl.refit import transport
from vllm_fp8rl.refit.liveness import lost_worker
from vllm_fp8rl.refit.receiver.files import read_files
from vllm_fp8rl.refit.receiver.session import RefitSession
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES, batches
from vllm_fp8rl.refit.transport import Payload, Place

logger = logging.getLogger("vllm.fp8rl")

Answer = dict[str, Any]
"""``value`` of a step, and ``error``: None, or the class name in :mod:`fp8rl.errors` and the
message."""


def read_answer(answer: Answer) -> Any:
    """Return the value of a step.

    Raises:
        Fp8RLError: the error that the step raised on the worker, of the same class.
    """
    if answer["error"] is None:
        return answer["value"]
    kind, message = answer["error"]
    raise getattr(errors, kind)(message)


def _step(run: Callable[..., Any]) -> Callable[..., Answer]:
    """Make a method answer with its value or its error."""

    @wraps(run)
    def step(worker: Any, *args: Any, **kwargs: Any) -> Answer:
        try:
            return {"value": run(worker, *args, **kwargs), "error": None}
        except Fp8RLError as error:
            return {"value": None, "error": (type(error).__name__, str(error))}
        except Exception as error:
            logger.exception("A step of a refit failed.")
            lost = lost_worker(run.__name__, error)
            return {"value": None, "error": (type(lost).__name__, str(lost))}

    return step


def _model(worker: Any) -> torch.nn.Module:
    return worker.model_runner.get_model()


def _guard(worker: Any) -> RefitGuard:
    return state_of(_model(worker)).guard


def _open_session(worker: Any, name: str) -> RefitSession:
    session = _guard(worker).session
    if session is None:
        raise RefitError("No refit is under way on this worker; begin one first.")
    if session.name != name:
        raise RefitError(
            "The refit under way on this worker has another name than the one given; wait until it "
            "has ended, then begin one."
        )
    assert isinstance(session, RefitSession)
    return session


class RefitMixin:
    """The steps as methods of a vLLM worker; put it before other bases of your own extension."""

    @_step
    def fp8rl_refit_begin(self, session: str, expect_kv_scales: bool) -> None:
        """Open a :class:`~vllm_fp8rl.refit.receiver.session.RefitSession`.

        ``session`` is a name that no other sender knows, such as ``uuid.uuid4().hex``; the other
        steps take it too, so that nobody goes on with or finishes the refit of another.
        """
        if not isinstance(session, str) or not isinstance(expect_kv_scales, bool):
            raise RefitError(
                "fp8rl_refit_begin takes the name of the session (a string) and whether KV scales "
                f"come (a boolean), not {session!r} and {expect_kv_scales!r}."
            )
        opened = RefitSession(_model(self), expect_kv_scales=expect_kv_scales, name=session)
        opened.__enter__()

    @_step
    def fp8rl_refit_place(self) -> Place:
        """Describe where this worker is; see :mod:`vllm_fp8rl.refit.transport`."""
        return transport.place()

    @_step
    def fp8rl_refit_load_batch(
        self, session: str, batch: Payload | list[tuple[str, torch.Tensor]]
    ) -> None:
        """Load tensors, or what :meth:`vllm_fp8rl.refit.transport.Sender.wrap` made of them."""
        opened = _open_session(self, session)
        if isinstance(batch, list):
            opened.load(batch)
            return
        with transport.received(batch, opened.check) as tensors:
            opened.load(tensors.items())

    @_step
    def fp8rl_refit_load_files(self, session: str, path: str) -> None:
        """Load a safetensors file, or all of a folder, a batch at a time."""
        # First, since all ranks take part in it.
        tensors = read_files(path, lambda coming: _open_session(self, session).check(coming))
        opened = _open_session(self, session)
        for batch in batches(tensors, BATCH_BYTES, kept=True):
            opened.load(batch)

    @_step
    def fp8rl_refit_outdates_cache(self, session: str) -> bool:
        """Answer whether codes in the KV cache are wrong already or would be after this refit."""
        return _open_session(self, session).changes_scales or _guard(self).cache_outdated

    @_step
    def fp8rl_refit_finish(self, session: str, keep_keys: bool = False) -> dict[str, Any]:
        """Verify that the refit is complete and let the model run; return the report as a dict.

        Unless the KV cache was emptied meanwhile, the model waits until it is: with ``keep_keys``,
        which lets requests go on with keys of the old weights, only if a K or V scale has changed.
        """
        opened = _open_session(self, session)
        opened.__exit__(None, None, None)
        assert opened.report is not None
        if not keep_keys:
            _guard(self).outdate_cache("keys of older weights")
        return asdict(opened.report)

    @_step
    def fp8rl_refit_abort(self, session: str, reason: str) -> bool:
        """Give up a session if it is open; return whether the model now refuses to run.

        It is named by its name or by its label, which errors give to other senders, and which the
        steps that go on with a refit do not take.
        """
        guard = _guard(self)
        if guard.session is not None and session in (guard.session.name, guard.label):
            guard.session.abandon(reason)
        return guard.closed

    @_step
    def fp8rl_refit_check(self) -> None:
        """Answer with an error unless the model could run now."""
        _guard(self).require_ready()

    @_step
    def fp8rl_set_kv_scales(self, scales: dict[str, float]) -> None:
        """Set scales, see :func:`vllm_fp8rl.kv.scales.set_kv_scales`, and end a calibration.

        The model refuses to run until the prefix cache has been emptied.
        """
        kv_scales.set_kv_scales(_model(self), scales)
        kv_observer.stop_observing(_model(self))

    @_step
    def fp8rl_missing_kv_scales(self) -> list[str]:
        """See :func:`vllm_fp8rl.kv.scales.missing_kv_scales`."""
        return kv_scales.missing_kv_scales(_model(self))

    @_step
    def fp8rl_observe_kv(self, provisional: dict[str, float]) -> None:
        """See :func:`vllm_fp8rl.kv.observer.start_observing`."""
        kv_observer.start_observing(_model(self), provisional)

    @_step
    def fp8rl_admit_kv_calibration(self, admitted: bool) -> None:
        """See :func:`vllm_fp8rl.kv.observer.admit_calibration`."""
        kv_observer.admit_calibration(_model(self), admitted)

    @_step
    def fp8rl_observed_kv(self) -> dict[str, Any]:
        """See :func:`vllm_fp8rl.kv.observer.observed`."""
        return kv_observer.observed(_model(self))

    @_step
    def fp8rl_stop_observing_kv(self) -> None:
        """See :func:`vllm_fp8rl.kv.observer.stop_observing`."""
        kv_observer.stop_observing(_model(self))


STEPS: dict[str, Callable[..., Answer]] = {
    name: step for name, step in vars(RefitMixin).items() if name.startswith("fp8rl_")
}
"""Every step by its name; each takes the worker first."""
BREAK_OFF: dict[str, Any] = {"fp8rl": "break off"}
"""For ``update_weights`` of vLLM's worker."""
NEED_IDLE = frozenset({"fp8rl_refit_begin", "fp8rl_set_kv_scales", "fp8rl_observe_kv"})
"""Steps that change what requests in flight depend on; see ``patches/requests.py``."""


class RefitWorker(RefitMixin):
    """``worker_extension_cls`` for engines that need no other extension."""


def has_refit_methods(extension: str) -> bool:
    """Tell whether a ``worker_extension_cls``, named in full or empty, has :class:`RefitMixin`."""
    return bool(extension) and issubclass(pkgutil.resolve_name(extension), RefitMixin)


def extension_remedy(extension: str) -> str:
    """Say how an engine whose ``worker_extension_cls`` lacks the steps of a refit gets them."""
    if extension:
        return f"give its worker extension '{extension}' the base class vllm_fp8rl.refit.RefitMixin"
    return f"start it with **vllm_fp8rl.engine_args(recipe) or worker_extension_cls='{EXTENSION}'"


def refusal(step: str) -> Answer:
    """Return the answer of a step that was not run because requests are in flight."""
    error = (
        f"{step} was refused because the engine has requests in flight; wait for them, pause "
        "generation first, or, where a step of theirs was refused, drop them with "
        "vllm_fp8rl.refit.drop_requests(llm)."
    )
    return {"value": None, "error": (RefitError.__name__, error)}


def refused_step(worker: Any) -> bool:
    """Answer whether a step was refused since the KV cache was emptied."""
    return _guard(worker).refused_step


def cache_emptied(worker: Any) -> None:
    """Note on a worker that its engine core has emptied the KV cache."""
    _guard(worker).cache_emptied()


def weights_going(worker: Any) -> None:
    """Close the model before vLLM's ``reset_weights``."""
    guard = _guard(worker)
    guard.stop_writing("reset_weights")
    guard.close("vLLM is resetting the weights")


def weights_gone(worker: Any) -> None:
    """Wait for every weight after vLLM's ``reset_weights``, as after a level-2 sleep."""
    from vllm_fp8rl.engine.sleep import discardable

    guard = _guard(worker)
    guard.sleep(["weights"], dict(discardable(_model(worker))))
    guard.wake(["weights"])
    guard.open()


def weight_update_open(worker: Any) -> bool:
    """Answer whether a weight update by vLLM's API is under way."""
    return worker.weight_transfer_engine.is_open


@_step
def weight_update_refused(worker: Any) -> None:
    """Answer with the error of the last step of a weight update, if this worker has refused it."""
    worker.weight_transfer_engine.raise_error()


def end_weight_update(worker: Any) -> None:
    """Break off a weight update, of which any worker may have refused a part."""
    with suppress(Exception):  # vLLM's worker forgets an update of which a part has failed
        worker.update_weights(BREAK_OFF)

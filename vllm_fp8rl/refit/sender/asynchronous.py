"""Refit of an ``AsyncLLM``: see :mod:`vllm_fp8rl.refit`, with requests in flight.

The engine core of an ``AsyncLLM`` runs in a process of its own and takes calls by name, so the
engine needs ``worker_extension_cls="vllm_fp8rl.refit.receiver.worker.RefitWorker"``, or an
extension of yours with :class:`~vllm_fp8rl.refit.receiver.worker.RefitMixin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from fp8rl import PluginManager
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.plugins.hookspecs import RefitReport
from vllm_fp8rl.compat import installed_version
from vllm_fp8rl.engine.guard import REMEDY
from vllm_fp8rl.refit.liveness import lost_worker, while_alive
from vllm_fp8rl.refit.receiver.session import Tensors
from vllm_fp8rl.refit.sender.client import (
    EMPTY_CACHE,
    HALF_UPDATED,
    OLD_KEYS,
    Changes,
    Steps,
    announce,
    refit_steps,
    require_emptied,
    send,
)
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

InFlight = Literal["drain", "abort", "keep", "continue"]
"""What happens to requests in flight: ``drain`` lets them end; ``abort`` aborts; ``keep`` stops
them, and they go on with the new weights after the tokens that they have, whose keys and values are
computed again; ``continue`` is ``keep`` with the keys and values that the old weights have made,
unless the refit changes a KV scale: then those are computed again too."""

_PAUSE_MODES: dict[InFlight, str] = {
    "drain": "wait",
    "abort": "abort",
    "keep": "keep",
    "continue": "keep",
}


async def refit_async(
    engine: AsyncLLM,
    tensors: Tensors,
    *,
    expect_kv_scales: bool,
    in_flight: InFlight = "drain",
    batch_bytes: int = BATCH_BYTES,
    weight_version: str | None = None,
    plugins: PluginManager | None = None,
) -> RefitReport:
    """Put new weights, and KV scales if announced, into a live ``AsyncLLM``.

    The engine is paused meanwhile: requests that arrive wait, and start with the new weights and
    an empty prefix cache (with ``in_flight="continue"`` they may find prefixes there whose keys the
    old weights have made). If the refit fails, or its task is cancelled, before the first write,
    the engine goes on with the old weights. Afterwards it is closed until a later refit is
    complete: it stays paused, requests that wait are aborted (but for ``keep`` and ``continue``)
    and new ones are refused with a RefitError.

    Args:
        engine: engine with ``quantization="fp8rl"`` and a worker extension that has the steps.
        tensors: HF-named tensors, each once, in any order; read one batch at a time in the thread
            of the event loop.
        expect_kv_scales: whether k and v scales of every layer are among them.
        in_flight: see :data:`InFlight`.
        batch_bytes: see :func:`vllm_fp8rl.refit.refit`.
        weight_version: vLLM's name for the new weights, which ``weight_versions`` of an answer
            gives for each span of its tokens; None: the name stays.
        plugins: whose ``refit_finished`` hooks to call; the installed ones by default.

    Returns:
        Counts of one rank; ``seconds`` includes the wait for requests in flight.

    Raises:
        RefitError: see :class:`~vllm_fp8rl.refit.receiver.session.RefitSession`; or another refit
            of this engine is under way, or a worker was lost.
        ScaleError: a bad scale.
        UnsupportedError: an engine without the steps, or with several engine cores; or a vLLM
            without weight versions.
    """
    if in_flight not in get_args(InFlight):
        raise RefitError(f"in_flight is '{in_flight}'; choose one of {get_args(InFlight)}.")
    if weight_version is not None and not hasattr(engine, "update_weight_version"):
        raise UnsupportedError(
            f"vLLM {installed_version()} has no weight versions; install 0.32.0, or leave "
            "weight_version out."
        )
    workers = _AsyncWorkers(engine)
    gate = _AsyncGate(engine)
    manager = PluginManager() if plugins is None else plugins
    keep_keys = in_flight == "continue"
    started = time.perf_counter()
    await gate.close(workers)
    try:
        pause = engine.pause_generation(mode=_PAUSE_MODES[in_flight], clear_cache=not keep_keys)
        await while_alive(engine, pause)
        session = workers.session
        transfer = send(session, tensors, batch_bytes)
        steps = refit_steps(session, expect_kv_scales, transfer, keep_keys=keep_keys)
        counts = await _run_steps(engine, workers, steps)
        if weight_version is not None:  # before a request goes on
            await while_alive(engine, engine.update_weight_version(weight_version))
    except BaseException as error:
        # Shielded: the task may be cancelled again, and half of this must not be left out.
        await _settle(_give_up(workers, gate, type(error).__name__, in_flight))
        raise
    await _settle(gate.open())
    report = RefitReport(**(counts | {"seconds": time.perf_counter() - started}))
    announce(report, manager)
    return report


async def _run_steps(engine: AsyncLLM, workers: _AsyncWorkers, steps: Steps) -> Any:
    answers: Any = None
    with closing(steps):
        while True:
            try:
                call = steps.send(answers)
            except StopIteration as end:
                return end.value
            if call is EMPTY_CACHE:
                reset = engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                require_emptied(await while_alive(engine, reset), OLD_KEYS)
            else:
                answers = await workers.call(call.step, *call.args)


async def _give_up(
    workers: _AsyncWorkers, gate: _AsyncGate, reason: str, in_flight: InFlight
) -> None:
    with contextlib.suppress(Exception):  # a dead engine core is as closed as can be
        if not any(await workers.call("fp8rl_refit_abort", workers.session, reason)):
            await gate.open()
            return
    gate.refuse(HALF_UPDATED)
    if in_flight not in ("keep", "continue"):
        with contextlib.suppress(Exception):
            await gate.abort_waiting()


async def _settle(steps: Coroutine[Any, Any, None]) -> None:
    """Await to the end, even while the task is being cancelled."""
    task = asyncio.ensure_future(steps)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    task.result()
    if cancelled is not None:
        raise cancelled


class _AsyncGate:
    """Pauses an ``AsyncLLM`` for a refit; after one that broke off it refuses requests.

    As with :class:`vllm_fp8rl.refit.sender.client.RequestGate`, a forward that raised in a worker
    would end the engine core, so the methods of this one engine object that take requests are
    replaced.
    """

    _METHODS = ("add_request", "generate", "encode")

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine: Any = engine
        self._changes = Changes.of(engine)
        self._resume = True

    async def close(self, workers: _AsyncWorkers) -> None:
        """Take the engine for one refit.

        Raises:
            RefitError: another refit has it.
        """
        changes = self._changes
        task, former = changes.under_way or (None, None)
        if task is not None and not task.done():
            raise RefitError("A refit of this engine is already under way; await it first.")
        changes.under_way = (asyncio.current_task(), workers)
        try:
            if former is not None:  # its task was ended before it could give up
                await former.call("fp8rl_refit_abort", former.session, "interrupted")
            paused = await while_alive(self._engine, self._engine.is_paused())
            self._resume = not paused if changes.resume is None else changes.resume
        except BaseException:
            changes.under_way = None
            raise

    async def open(self) -> None:
        """Serve requests; but stay paused if the engine was before the refit."""
        for name in self._METHODS:
            self._engine.__dict__.pop(name, None)
        self._changes.resume = self._changes.under_way = None
        if self._resume:
            await while_alive(self._engine, self._engine.resume_generation())

    def refuse(self, reason: str) -> None:
        """Refuse requests from now on; the engine stays paused."""

        async def add_request(*args: object, **kwargs: object) -> NoReturn:
            raise RefitError(f"{reason}; {REMEDY}.")

        # Not left to their call of add_request: they would hide the error behind one without text.
        async def generate(*args: object, **kwargs: object) -> AsyncIterator[NoReturn]:
            yield await add_request()

        for name in self._METHODS:
            setattr(self._engine, name, add_request if name == "add_request" else generate)
        self._changes.resume, self._changes.under_way = self._resume, None

    async def abort_waiting(self) -> None:
        """Abort the requests that wait for the engine to resume."""
        waiting = self._engine.pause_generation(mode="abort", clear_cache=False)
        await while_alive(self._engine, waiting)


class _AsyncWorkers:
    """The workers of an ``AsyncLLM``, see :class:`vllm_fp8rl.refit.sender.client.Workers`."""

    def __init__(self, engine: AsyncLLM) -> None:
        from vllm_fp8rl.refit.receiver import worker

        self._engine: Any = engine
        self.session = uuid.uuid4().hex
        parallel = self._engine.vllm_config.parallel_config
        if not worker.has_refit_methods(parallel.worker_extension_cls):
            raise UnsupportedError(
                "An AsyncLLM takes calls by name only; "
                f"{worker.extension_remedy(parallel.worker_extension_cls)}."
            )
        # With an external or a hybrid load balancer, an AsyncLLM has the cores of its node only.
        local = parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb
        cores = parallel.data_parallel_size_local if local else parallel.data_parallel_size
        if cores > 1:
            raise UnsupportedError(
                f"This AsyncLLM has {cores} engine cores (data parallel), of which vLLM "
                "returns one answer only; start one AsyncLLM for each and refit them all."
            )

    async def call(self, step: str, *args: object) -> list[Any]:
        """Run a step on every worker and return their values; it raises as ``Workers.call``."""
        from vllm_fp8rl.refit.receiver import worker

        try:
            call = self._engine.collective_rpc(step, args=args)
            answers = await while_alive(self._engine, call)
        except Exception as error:
            raise lost_worker(step, error) from error
        return [worker.read_answer(answer) for answer in answers]

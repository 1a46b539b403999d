"""Refit of an ``AsyncLLM``: see :mod:`vllm_fp8rl.refit`, with requests in flight.

The engine core of an ``AsyncLLM`` runs in a process of its own and takes calls by name, so the
engine needs ``worker_extension_cls="vllm_fp8rl.refit.worker.RefitWorker"``, or an extension of yours with
:class:`~vllm_fp8rl.refit.worker.RefitMixin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

from fp8rl import PluginManager
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.hookspecs import RefitReport
from vllm_fp8rl.refit.client import announce
from vllm_fp8rl.refit.guard import REMEDY
from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
from vllm_fp8rl.refit.liveness import lost_worker, while_alive
from vllm_fp8rl.refit.session import Tensors
from vllm_fp8rl.refit.transport import GPU_BATCH_FACTOR, Sender

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

InFlight = Literal["drain", "abort", "keep"]
"""Of requests in flight: ``drain`` lets them end, ``abort`` aborts them, ``keep`` stops them; they
go on with the new weights after the tokens that they have, whose keys and values are made anew."""

_PAUSE_MODES: dict[InFlight, str] = {"drain": "wait", "abort": "abort", "keep": "keep"}


async def refit_async(
    engine: AsyncLLM,
    tensors: Tensors,
    *,
    expect_kv_scales: bool,
    in_flight: InFlight = "drain",
    batch_bytes: int = BATCH_BYTES,
    plugins: PluginManager | None = None,
) -> RefitReport:
    """Put new weights, and KV scales if announced, into a live ``AsyncLLM``.

    The engine is paused meanwhile: requests that arrive wait, and start with the new weights and
    an empty prefix cache. If the refit fails, or its task is cancelled, before the first write, the
    engine goes on with the old weights. Afterwards it is closed until a later refit is complete:
    it stays paused, requests that wait are aborted (but for ``in_flight="keep"``) and new ones are
    refused with a RefitError.

    Args:
        engine: started with ``quantization="fp8rl"`` and a worker extension that has the steps.
        tensors: HF-named tensors, each once, in any order; read one batch at a time in the thread
            of the event loop.
        expect_kv_scales: whether k and v scales of every layer are among them.
        in_flight: see :data:`InFlight`.
        batch_bytes: see :func:`vllm_fp8rl.refit.refit`.
        plugins: whose ``refit_finished`` hooks to call; the installed ones by default.

    Returns:
        Counts of one rank; ``seconds`` includes the wait for requests in flight.

    Raises:
        RefitError: see :class:`~vllm_fp8rl.refit.session.RefitSession`; or another refit of this engine
            is under way, or a worker was lost.
        ScaleError: a bad scale.
        UnsupportedError: an engine without the steps, or with several engine cores.
    """

    async def transfer(workers: _AsyncWorkers) -> None:
        places = await workers.call("place")
        with Sender(places, batch_bytes * GPU_BATCH_FACTOR) as sender:
            for batch in batches(tensors, batch_bytes, gpu_factor=sender.gpu_factor):
                await workers.call("load_batch", workers.session, sender.wrap(batch))

    return await _run(engine, transfer, expect_kv_scales, in_flight, plugins)


async def refit_async_from_files(
    engine: AsyncLLM,
    path: str,
    *,
    expect_kv_scales: bool,
    in_flight: InFlight = "drain",
    plugins: PluginManager | None = None,
) -> RefitReport:
    """Like :func:`refit_async`, from a safetensors file or a folder that every worker reads."""

    async def transfer(workers: _AsyncWorkers) -> None:
        await workers.call("load_files", workers.session, path)

    return await _run(engine, transfer, expect_kv_scales, in_flight, plugins)


async def _run(
    engine: AsyncLLM,
    transfer: Callable[[_AsyncWorkers], Coroutine[Any, Any, None]],
    expect_kv_scales: bool,
    in_flight: InFlight,
    plugins: PluginManager | None,
) -> RefitReport:
    if in_flight not in get_args(InFlight):
        raise RefitError(f"in_flight is '{in_flight}'; choose one of {get_args(InFlight)}.")
    workers, door = _AsyncWorkers(engine), _AsyncFrontDoor(engine)
    manager = PluginManager() if plugins is None else plugins
    started = time.perf_counter()
    await door.shut(workers)
    try:
        await while_alive(
            engine, engine.pause_generation(mode=_PAUSE_MODES[in_flight], clear_cache=True)
        )
        await workers.call("begin", workers.session, expect_kv_scales)
        await transfer(workers)
        # Not before: a forward between the pause and the first write may have filled it again.
        emptied = engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if not await while_alive(engine, emptied):
            raise RefitError(
                "vLLM could not reset its prefix cache, which holds keys of the old weights; stop "
                "whatever holds KV blocks and refit again."
            )
        counts = (await workers.call("finish", workers.session))[0]
    except BaseException as error:
        # Shielded: the task may be cancelled again, and half of this must not be left out.
        await _settle(_give_up(workers, door, type(error).__name__, in_flight))
        raise
    await _settle(door.open())
    report = RefitReport(**(counts | {"seconds": time.perf_counter() - started}))
    announce(report, manager)
    return report


async def _give_up(
    workers: _AsyncWorkers, door: _AsyncFrontDoor, reason: str, in_flight: InFlight
) -> None:
    mixed = True
    with contextlib.suppress(Exception):  # a dead engine core is as closed as can be
        mixed = any(await workers.call("abort", workers.session, reason))
        if not mixed:
            await door.open()
            return
    door.lock("The weights are a mixture: a refit broke off or was incomplete")
    if in_flight != "keep":
        with contextlib.suppress(Exception):
            await door.abort_waiting()


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


class _Refusal:
    """Stands in for the methods that take requests, while the weights are a mixture."""

    METHODS = ("add_request", "generate", "encode")
    _ATTRIBUTE = "_fp8rl_refit_refusal"

    def __init__(self, reason: str, resume: bool) -> None:
        self._reason = reason
        self.resume = resume
        """Whether a complete refit resumes the engine: not where its user had paused it."""

    @classmethod
    def of(cls, engine: Any) -> _Refusal | None:
        return engine.__dict__.get(cls._ATTRIBUTE)

    def cover(self, engine: Any) -> None:
        setattr(engine, self._ATTRIBUTE, self)
        for name in self.METHODS:
            setattr(engine, name, getattr(self, name))

    def uncover(self, engine: Any) -> None:
        for name in (*self.METHODS, self._ATTRIBUTE):
            delattr(engine, name)

    async def add_request(self, *args: object, **kwargs: object) -> NoReturn:
        raise RefitError(f"{self._reason}; {REMEDY}.")

    # Not left to their call of add_request: they would hide the error behind one without a message.
    async def generate(self, *args: object, **kwargs: object) -> AsyncIterator[NoReturn]:
        yield await self.add_request()

    encode = generate


class _AsyncFrontDoor:
    """Pauses an engine for a refit; locked, it refuses requests before any worker hears of them.

    As with ``LLM`` (see :class:`vllm_fp8rl.refit.client.RequestGate`), a forward that raised in a worker
    would end the engine core, so the methods of this one engine object are covered by attributes.
    """

    _BUSY = "_fp8rl_refit_under_way"
    """Attribute of the engine: task and workers of the refit that has taken it."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine: Any = engine
        self._resume = True

    async def shut(self, workers: _AsyncWorkers) -> None:
        """Take the engine for one refit.

        Raises:
            RefitError: it is taken.
        """
        task, former = getattr(self._engine, self._BUSY, (None, None))
        if task is not None and not task.done():
            raise RefitError("A refit of this engine is already under way; await it first.")
        setattr(self._engine, self._BUSY, (asyncio.current_task(), workers))
        try:
            if former is not None:  # its task was ended before it could give up
                await former.call("abort", former.session, "interrupted")
            left = _Refusal.of(self._engine)
            paused = await while_alive(self._engine, self._engine.is_paused())
            self._resume = left.resume if left else not paused
        except BaseException:
            delattr(self._engine, self._BUSY)
            raise

    async def open(self) -> None:
        """Serve requests; but stay paused if the engine was before the refit."""
        refusal = _Refusal.of(self._engine)
        if refusal:
            refusal.uncover(self._engine)
        delattr(self._engine, self._BUSY)
        if self._resume:
            await while_alive(self._engine, self._engine.resume_generation())

    def lock(self, reason: str) -> None:
        """Refuse requests from now on; the engine stays paused."""
        _Refusal(reason, self._resume).cover(self._engine)
        delattr(self._engine, self._BUSY)

    async def abort_waiting(self) -> None:
        waiting = self._engine.pause_generation(mode="abort", clear_cache=False)
        await while_alive(self._engine, waiting)


class _AsyncWorkers:
    """The engine's workers: one call reaches all, errors come back as they were raised."""

    def __init__(self, engine: AsyncLLM) -> None:
        from vllm_fp8rl.refit import worker

        self._engine: Any = engine
        self.session = uuid.uuid4().hex
        parallel = self._engine.vllm_config.parallel_config
        if not worker.has_refit_methods(parallel.worker_extension_cls):
            raise UnsupportedError(
                "An AsyncLLM takes calls by name only; start it with "
                f"worker_extension_cls='{worker.EXTENSION}', or put vllm_fp8rl.refit.worker.RefitMixin "
                "into your own extension."
            )
        cores = getattr(self._engine.engine_core, "core_engines", (None,))
        if len(cores) > 1:
            raise UnsupportedError(
                f"This AsyncLLM has {len(cores)} engine cores (data parallel), of which vLLM "
                "returns one answer only; start one AsyncLLM for each and refit them all."
            )

    async def call(self, step: str, *args: object) -> list[Any]:
        """Run a step of :mod:`vllm_fp8rl.refit.worker` on every worker; their values.

        Raises:
            Fp8RLError: what the step raised.
            RefitError: a worker failed in another way, e.g. its process has died.
        """
        from vllm_fp8rl.refit import worker

        try:
            call = self._engine.collective_rpc(f"fp8rl_refit_{step}", args=args)
            answers = await while_alive(self._engine, call)
        except Exception as error:
            raise lost_worker(step, error) from error
        return [worker.read_answer(answer) for answer in answers]

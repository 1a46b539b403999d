"""Changes of an engine, as the process that owns its ``LLM`` makes them.

A change (a refit, a calibration of KV scales) closes the engine first and opens it last. Whatever
ends it early, an error or Ctrl-C at any point, it is undone; and if the undoing is interrupted too,
the engine stays closed and the next change begins by undoing what was left.

The steps of a refit are described once, for ``LLM`` and ``AsyncLLM``: a description is a generator
that yields :class:`Call` and is sent the workers' values.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from fp8rl import PluginManager
from fp8rl.errors import Fp8RLError, RefitError, UnsupportedError
from fp8rl.plugins.hookspecs import RefitReport
from vllm_fp8rl.engine.guard import REMEDY
from vllm_fp8rl.engine.names import NAME, uses_fp8rl
from vllm_fp8rl.refit.liveness import ended_by_death, lost_worker
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES, batches
from vllm_fp8rl.refit.transport import GPU_BATCH_FACTOR, Sender, place

if TYPE_CHECKING:
    from vllm import LLM

T = TypeVar("T")

_NO_LIMIT = 1 << 62  # as the factor by which batches of GPU tensors are larger
_ADMITTED: ContextVar[bool] = ContextVar("fp8rl_admitted", default=False)

logger = logging.getLogger("vllm.fp8rl")


class Call(NamedTuple):
    """A step of :class:`~vllm_fp8rl.refit.receiver.worker.RefitMixin` that every worker runs."""

    step: str
    args: tuple[Any, ...] = ()


OLD_KEYS = "keys of the old weights"
HALF_UPDATED = "The weights are half-updated: a refit broke off or was incomplete"
EMPTY_CACHE = Call("reset_prefix_cache")
"""The one step of the engine core: it empties the prefix cache, and a KV connector's."""

Steps = Generator[Call, list[Any], Any]


class Changes:
    """The changes of one engine, one after the other.

    The engine's quantization config keeps this object, because any holder of the engine may start a
    change; several engines may share a config. The fields without an underscore belong to the
    request gates.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._left: Callable[[str], None] | None = None
        self._plugins: PluginManager | None = None
        self.require_open: Callable[[], None] | None = None
        """Raises the reason why an ``LLM`` refuses requests; None while it takes them."""
        self.under_way: tuple[Any, Any] | None = None
        """Task and workers of the refit of an ``AsyncLLM`` that is under way."""
        self.resume: bool | None = None
        """While an ``AsyncLLM`` refuses requests: whether a complete refit resumes it."""
        self.could_run = False
        """Whether the workers have once answered that the model could run."""

    @classmethod
    def of(cls, engine: Any) -> Changes:
        """Return the changes of an engine (``LLMEngine`` or ``AsyncLLM``).

        Raises:
            RefitError: the engine was not started with ``quantization="fp8rl"``.
            UnsupportedError: this vLLM lacks a function that the request gates replace.
        """
        if not uses_fp8rl(engine.vllm_config):
            raise RefitError(
                f"This engine has no quantization='{NAME}'; start it with that to refit it."
            )
        changes = engine.vllm_config.quant_config.changes
        if engine not in changes:
            engine.vllm_config.quant_config.check_gates()
        return changes.setdefault(engine, cls())

    @property
    def plugins(self) -> PluginManager:
        """The installed plugins, searched for once, as that reads every package's metadata."""
        if self._plugins is None:
            self._plugins = PluginManager()
        return self._plugins

    def run(self, change: Callable[[], T], undo: Callable[[str], None]) -> T:
        """Make a change.

        Args:
            change: function that makes the change.
            undo: function that leaves the engine as it was or closed, wherever the change has
                ended; it takes the name of the error and may be called twice.

        Raises:
            RefitError: another thread is changing the engine.
        """
        if self._turn.locked():
            raise RefitError(
                "Another refit or calibration of this engine is already under way in another "
                "thread; wait until it has ended."
            )
        # ``with``, because Python runs no signal handler between it and the lock.
        with self._turn:
            if self._left is not None:
                self._left("interrupted")
            self._left = undo
            try:
                result = change()
            except BaseException as error:
                undo(type(error).__name__)
                self._left = None  # not reached if that was interrupted
                raise
            self._left = None
            return result


class RequestGate:
    """Refuses new requests where an ``LLM`` takes them, before any worker hears of them.

    vLLM has no such switch. A worker that raises ends a multiprocess engine, and leaves requests
    behind in an in-process one, so the refusal must come earlier: ``add_request`` of this one
    engine object is replaced while the gate is closed. ``RefitGuard`` in the workers stays behind
    it for requests that arrive in another way.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.llm_engine
        self._changes = Changes.of(self._engine)

    def close(
        self, reason: str, remedy: str = REMEDY, *, mended: Callable[[], bool] = lambda: False
    ) -> None:
        """Refuse requests from now on, except within :func:`admitted`.

        Args:
            reason: beginning of the error.
            remedy: end of the error.
            mended: whether the workers may run by now, e.g. by a refit that did not come this way;
                called at each request, and opens the gate.
        """
        engine = self._engine
        take = type(engine).add_request.__get__(engine)

        def require_open() -> None:
            if not mended():
                raise RefitError(f"{reason}; {remedy}.")
            self.open()

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if not _ADMITTED.get():
                require_open()
            return take(*args, **kwargs)

        self._changes.require_open = require_open
        engine.add_request = refuse

    def open(self) -> None:
        """Take requests again."""
        self._engine.__dict__.pop("add_request", None)
        self._changes.require_open = None

    def require_open(self) -> None:
        """Raise RefitError with the reason why requests are refused, if they are."""
        if self._changes.require_open is not None:
            self._changes.require_open()


def admitted(run: Callable[[], T]) -> T:
    """Call a function whose requests pass a closed :class:`RequestGate`; others' still do not."""

    def inside() -> T:
        _ADMITTED.set(True)
        return run()

    return copy_context().run(inside)  # however it ends, the variable is as before outside


class Workers:
    """The workers of an ``LLM``: a call reaches all, and errors come back as they were raised."""

    def __init__(self, llm: LLM) -> None:
        from vllm_fp8rl.refit.receiver import worker

        self._llm = llm
        engine: Any = llm.llm_engine
        core_here = getattr(engine, "model_executor", None) is not None
        extension = engine.vllm_config.parallel_config.worker_extension_cls
        self._by_name = worker.has_refit_methods(extension)
        if not core_here and not self._by_name:
            raise UnsupportedError(
                "This engine runs in a process of its own, which takes calls by name only; "
                f"{worker.extension_remedy(extension)}, or set VLLM_ENABLE_V1_MULTIPROCESSING=0."
            )

    def call(self, step: str, *args: object) -> list[Any]:
        """Run a step of :class:`~vllm_fp8rl.refit.receiver.worker.RefitMixin` on every worker.

        Returns the value of each, or raises the error of the step, or RefitError if a worker failed
        in another way, e.g. its process has died.
        """
        from vllm_fp8rl.refit.receiver import worker

        method: Any = step if self._by_name else worker.STEPS[step]
        core: Any = self._llm.llm_engine.engine_core
        try:
            with ended_by_death(core):
                answers = self._llm.collective_rpc(method, args=args)
        except Exception as error:
            raise lost_worker(step, error) from error
        return [worker.read_answer(answer) for answer in answers]

    def run(self, steps: Steps) -> Any:
        """Run described steps one after the other, and return the value of the description."""
        answers: Any = None
        with closing(steps):
            while True:
                try:
                    call = steps.send(answers)
                except StopIteration as end:
                    return end.value
                if call is EMPTY_CACHE:
                    forget_prefixes(self._llm, OLD_KEYS)
                else:
                    answers = self.call(call.step, *call.args)

    def may_run(self) -> bool:
        """Tell whether a step could run on every worker."""
        try:
            self.call("fp8rl_refit_check")
        except Fp8RLError:
            return False
        return True


def drop_requests(llm: LLM) -> None:
    """Abort every request, e.g. those that an in-process engine keeps after a step raised.

    It empties the prefix cache too: vLLM enters blocks there before the step that fills them.
    """
    engine: Any = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    llm.reset_prefix_cache(reset_connector=True)


def require_idle(llm: LLM) -> None:
    """Raise RefitError while an engine has requests.

    Those that an in-process engine has kept after it refused a step are dropped: they can never go
    on, and whoever made them has the error.
    """
    engine: Any = llm.llm_engine
    if not engine.has_unfinished_requests():
        return
    if getattr(engine, "model_executor", None) is not None:
        from vllm_fp8rl.refit.receiver.worker import refused_step

        if any(llm.collective_rpc(refused_step)):
            logger.warning("fp8rl: the requests of a step that was refused are dropped.")
            drop_requests(llm)
    if engine.has_unfinished_requests():
        raise RefitError(
            "The engine has requests in flight; finish them, or drop them with "
            "vllm_fp8rl.refit.drop_requests(llm), and try again; if some stay, restart it."
        )


def forget_prefixes(llm: LLM, what: str) -> None:
    """Empty the prefix cache of an idle engine, and a KV connector's, which hold ``what``."""
    require_emptied(llm.reset_prefix_cache(reset_connector=True), what)


def require_emptied(emptied: bool, what: str) -> None:
    """Raise RefitError if vLLM's ``reset_prefix_cache`` has answered that it could not."""
    if not emptied:
        raise RefitError(
            f"vLLM could not reset its prefix cache, which holds {what}; stop whatever holds KV "
            "blocks and try again."
        )


def announce(report: RefitReport, plugins: PluginManager) -> None:
    """Tell plugins of a complete refit. The new weights serve: an error of theirs is logged."""
    try:
        plugins.hook.refit_finished(report=report)
    except Exception:
        logger.exception("A plugin's refit_finished failed; the refit itself is complete.")


def refit_steps(
    session: str, expect_kv_scales: bool, transfer: Steps, *, keep_keys: bool = False
) -> Steps:
    """Describe a refit; its value is the report of the first rank, as a dict.

    With ``keep_keys`` the KV cache stays unless a KV scale has changed since it was emptied.
    """
    yield Call("fp8rl_refit_begin", (session, expect_kv_scales))
    yield from transfer
    # Not before: a forward between the pause of an AsyncLLM and the first write may fill it again.
    if not keep_keys or any((yield Call("fp8rl_refit_outdates_cache", (session,)))):
        yield EMPTY_CACHE
    reports = yield Call("fp8rl_refit_finish", (session, keep_keys))
    return reports[0]


def send(
    session: str,
    tensors: Iterable[tuple[str, torch.Tensor]],
    batch_bytes: int = BATCH_BYTES,
    *,
    held: bool = False,
) -> Steps:
    """Describe how workers get tensors: as they are in this process, packed in others.

    Args:
        tensors: HF-named tensors, read one batch at a time.
        batch_bytes: bytes handed over at once; more for tensors on a GPU that the workers see.
        held: all tensors exist already, so that those on a GPU may go to this process at once.
    """
    places = yield Call("fp8rl_refit_place")
    here = place()
    if all((each["host"], each["process"]) == (here["host"], here["process"]) for each in places):
        factor = _NO_LIMIT if held else GPU_BATCH_FACTOR
        for batch in batches(tensors, batch_bytes, gpu_factor=factor):
            yield Call("fp8rl_refit_load_batch", (session, batch))
        return
    with Sender(places, batch_bytes * GPU_BATCH_FACTOR) as sender:
        for batch in batches(tensors, batch_bytes, gpu_factor=sender.gpu_factor):
            yield Call("fp8rl_refit_load_batch", (session, sender.wrap(batch)))


def send_path(session: str, path: str) -> Steps:
    """Describe how workers read a safetensors file or a folder by themselves."""
    yield Call("fp8rl_refit_load_files", (session, path))

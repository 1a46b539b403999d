"""The doors for new weights and KV scales into a live engine, complete or refused.

:func:`refit` takes HF-named tensors and an ``LLM``, feeds every worker in bounded batches, and
leaves the engine with the new weights or closed to generation. What works on one rank's model is
:class:`~vllm_fp8rl.refit.session.RefitSession`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from fp8rl import PluginManager
from fp8rl.errors import RefitError
from fp8rl.hookspecs import RefitReport
from vllm_fp8rl.refit.client import Changes, RequestGate, Workers, announce, forget_prefixes
from vllm_fp8rl.refit.client import (
    drop_requests as drop_requests,  # a part of this module's interface
)
from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
from vllm_fp8rl.refit.session import RefitSession as RefitSession  # likewise
from vllm_fp8rl.refit.session import Tensors
from vllm_fp8rl.refit.transport import GPU_BATCH_FACTOR, Sender

if TYPE_CHECKING:
    from vllm import LLM

_NO_LIMIT = 1 << 62  # as the factor by which batches of GPU tensors are larger


def refit(
    llm: LLM,
    tensors: Tensors,
    *,
    expect_kv_scales: bool,
    batch_bytes: int | None = None,
    plugins: PluginManager | None = None,
) -> RefitReport:
    """Put new weights, and KV scales if announced, into a live engine.

    Serves the in-process executor and the multiprocess one (tensor parallelism): each worker gets
    every whole tensor and keeps its part. Afterwards the prefix cache is empty and the hook
    ``refit_finished`` has been called. On any failure after the first write the engine refuses to
    generate until a later refit is complete.

    Args:
        llm: an idle engine started with ``quantization="fp8rl"``.
        tensors: HF-named tensors, each once, in any order; read one batch at a time. One that is
            written to before its batch is read, as in a sender that fills the same memory again
            for the next tensor, is refused; there ``batch_bytes=1`` has each read at once.
        expect_kv_scales: whether k and v scales of every layer are among them.
        batch_bytes: bytes handed over at once, ``BATCH_BYTES`` by default. Without it all GPU
            tensors of a list, dict view or other collection go at once where they stay in this
            process, so that all are checked before the first is written; otherwise, and from an
            iterator, which may make them, ``GPU_BATCH_FACTOR`` times the bytes for tensors on a
            GPU that the workers see.
        plugins: whose ``refit_finished`` hooks to call; the installed ones by default.

    Returns:
        Counts of one rank; ``tensors`` and ``received_bytes`` are those on the wire.

    Raises:
        RefitError: see :class:`RefitSession`; or the engine has requests in flight, or lost a
            worker.
        ScaleError: a bad scale.
        UnsupportedError: an engine that cannot be reached in this way.
    """
    return _run(
        llm,
        lambda workers, session: _load(workers, session, tensors, batch_bytes),
        expect_kv_scales=expect_kv_scales,
        plugins=plugins,
    )


def refit_from_files(
    llm: LLM,
    path: str,
    *,
    expect_kv_scales: bool,
    plugins: PluginManager | None = None,
) -> RefitReport:
    """Like :func:`refit`, from a safetensors file, or a folder of them, that every worker reads."""
    return _run(
        llm,
        lambda workers, session: workers.call("load_files", session, path),
        expect_kv_scales=expect_kv_scales,
        plugins=plugins,
    )


def require_ready(llm: LLM) -> None:
    """Ask every worker whether a step could run, without running one.

    A step that must not run raises in the worker, which ends an engine core that has a process of
    its own. After weights came by another way than :func:`refit`, ask first.

    Raises:
        RefitError: the weights are not those of one complete refit, or sleep.
        ScaleError: KV scales are missing.
        UnsupportedError: an engine that cannot be reached in this way.
    """
    Workers(llm).call("check")


def _run(
    llm: LLM,
    transfer: Callable[[Workers, str], object],
    *,
    expect_kv_scales: bool,
    plugins: PluginManager | None,
) -> RefitReport:
    changes, gate, workers = Changes.of(llm), RequestGate(llm), Workers(llm)
    session = uuid.uuid4().hex
    begun = False

    def change() -> dict[str, Any]:
        nonlocal begun
        if llm.llm_engine.has_unfinished_requests():
            raise RefitError(
                "The engine has requests in flight; finish them, or drop them with "
                "vllm_fp8rl.refit.drop_requests(llm), then refit; if some stay, restart it."
            )
        workers.call("begin", session, expect_kv_scales)
        begun = True
        gate.close("a refit is under way")
        transfer(workers, session)
        forget_prefixes(llm, "keys of the old weights")
        counts: dict[str, Any] = workers.call("finish", session)[0]
        gate.open()
        return counts

    def undo(reason: str) -> None:
        mixed = True
        with contextlib.suppress(Exception):  # a dead worker is as closed as can be
            mixed = any(workers.call("abort", session, reason))
        if not begun:
            return
        if mixed:
            mixture = "The weights are a mixture: a refit broke off or was incomplete"
            gate.close(mixture, mended=workers.may_run)
        else:
            gate.open()

    manager = changes.plugins if plugins is None else plugins
    started = time.perf_counter()
    counts = changes.run(change, undo)
    report = RefitReport(**(counts | {"seconds": time.perf_counter() - started}))
    announce(report, manager)
    return report


def _load(workers: Workers, session: str, tensors: Tensors, batch_bytes: int | None) -> None:
    """Hand tensors to the workers in batches."""
    limit = BATCH_BYTES if batch_bytes is None else batch_bytes
    if workers.in_process:
        held = batch_bytes is None and isinstance(tensors, Collection)
        factor = _NO_LIMIT if held else GPU_BATCH_FACTOR
        for batch in batches(tensors, limit, gpu_factor=factor):
            workers.call("load_batch", session, batch)
        return
    with Sender(workers.call("place"), limit * GPU_BATCH_FACTOR) as sender:
        for batch in batches(tensors, limit, gpu_factor=sender.gpu_factor):
            workers.call("load_batch", session, sender.wrap(batch))

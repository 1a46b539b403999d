"""Refit of an ``LLM``: new weights and KV scales for a live engine, complete or refused.

:func:`refit` takes HF-named tensors and an ``LLM``, feeds every worker in bounded batches, and
leaves the engine with the new weights or closed to generation. What works on one rank's model is
:class:`~vllm_fp8rl.refit.receiver.session.RefitSession`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from fp8rl import PluginManager
from fp8rl.plugins.hookspecs import RefitReport
from vllm_fp8rl.refit.receiver.session import Tensors
from vllm_fp8rl.refit.sender.client import (
    HALF_UPDATED,
    Changes,
    RequestGate,
    Steps,
    Workers,
    announce,
    refit_steps,
    require_idle,
    send,
    send_path,
)
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES

if TYPE_CHECKING:
    from vllm import LLM


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
    held = batch_bytes is None and isinstance(tensors, Collection)
    limit = BATCH_BYTES if batch_bytes is None else batch_bytes
    return _run(
        llm, lambda session: send(session, tensors, limit, held=held), expect_kv_scales, plugins
    )


def refit_from_files(
    llm: LLM, path: str, *, expect_kv_scales: bool, plugins: PluginManager | None = None
) -> RefitReport:
    """Like :func:`refit`, from a safetensors file, or a folder of them, that every worker reads."""
    return _run(llm, lambda session: send_path(session, path), expect_kv_scales, plugins)


def require_ready(llm: LLM) -> None:
    """Ask every worker whether a step could run, without running one.

    A step that must not run raises in the worker, which ends an engine core that has a process of
    its own. After weights came by another way than :func:`refit`, ask first.

    Raises:
        RefitError: the weights are not those of one complete refit, or sleep.
        ScaleError: KV scales are missing.
        UnsupportedError: an engine that cannot be reached in this way.
    """
    Workers(llm).call("fp8rl_refit_check")


def _run(
    llm: LLM,
    transfer: Callable[[str], Steps],
    expect_kv_scales: bool,
    plugins: PluginManager | None,
) -> RefitReport:
    changes, gate, workers = Changes.of(llm.llm_engine), RequestGate(llm), Workers(llm)
    session = uuid.uuid4().hex
    sent = begun = False

    def after_begin() -> Steps:
        nonlocal begun
        begun = True
        gate.close("a refit is under way")
        yield from transfer(session)

    def change() -> dict[str, Any]:
        nonlocal sent
        require_idle(llm)
        sent = True
        counts = workers.run(refit_steps(session, expect_kv_scales, after_begin()))
        gate.open()
        return counts

    def undo(reason: str) -> None:
        if not sent:
            return
        closed = True
        with contextlib.suppress(Exception):  # a dead worker is as closed as can be
            closed = any(workers.call("fp8rl_refit_abort", session, reason))
        if not begun:  # nothing was written; the model may be closed by the session of another
            return
        if closed:
            gate.close(HALF_UPDATED, mended=workers.may_run)
        else:
            gate.open()

    manager = changes.plugins if plugins is None else plugins
    started = time.perf_counter()
    counts = changes.run(change, undo)
    report = RefitReport(**(counts | {"seconds": time.perf_counter() - started}))
    announce(report, manager)
    return report

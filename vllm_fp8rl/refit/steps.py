"""The steps of a refit, described once for ``LLM`` and ``AsyncLLM``.

A description is a generator that yields :class:`Call` and is sent the workers' values. How a call
reaches the workers, and what happens after a failure, is in :mod:`vllm_fp8rl.refit.synchronous`
and :mod:`vllm_fp8rl.refit.asynchronous`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

import torch

from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
from vllm_fp8rl.refit.transport import GPU_BATCH_FACTOR, Sender, place

_NO_LIMIT = 1 << 62  # as the factor by which batches of GPU tensors are larger


class Call(NamedTuple):
    """A step of :class:`~vllm_fp8rl.refit.worker.RefitMixin` that every worker runs."""

    step: str
    args: tuple[Any, ...] = ()


EMPTY_CACHE = Call("reset_prefix_cache")
"""The one step of the engine core: it empties the prefix cache, and a KV connector's."""

Steps = Generator[Call, list[Any], Any]


def refit_steps(session: str, expect_kv_scales: bool, transfer: Steps) -> Steps:
    """Describe a refit.

    Args:
        session: name of the session.
        expect_kv_scales: see :class:`~vllm_fp8rl.refit.session.RefitSession`.
        transfer: the steps that bring the tensors.

    Returns:
        The report of the first rank, as a dict.
    """
    yield Call("fp8rl_refit_begin", (session, expect_kv_scales))
    yield from transfer
    # Not before: a forward between the pause of an AsyncLLM and the first write may fill it again.
    yield EMPTY_CACHE
    reports = yield Call("fp8rl_refit_finish", (session,))
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
        session: name of the session.
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

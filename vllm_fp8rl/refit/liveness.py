"""End calls to an engine core in another process when that process dies.

vLLM marks such an engine as dead but never completes the futures of pending calls, so a caller
waits for an answer for ever (0.25.1 and 0.32, ``MPClient.utility_results``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

from fp8rl.errors import RefitError

_SECONDS = 0.5


@contextmanager
def ended_by_death(core: Any) -> Iterator[None]:
    """Let calls to an ``LLM``'s engine core raise EngineDeadError in the block once it is dead."""
    resources = getattr(core, "resources", None)
    if resources is None:
        yield
        return
    done = threading.Event()

    def watch() -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        while not done.wait(_SECONDS):
            if resources.engine_dead:
                for future in list(core.utility_results.values()):
                    with suppress(InvalidStateError):  # answered after all
                        future.set_exception(EngineDeadError())

    watcher = threading.Thread(target=watch, name="fp8rl-engine-core", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()


async def while_alive(engine: Any, call: Coroutine[Any, Any, Any]) -> Any:
    """Return the answer to a call of an ``AsyncLLM``, or raise its ``dead_error``."""
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            if engine.errored:
                raise engine.dead_error
            await asyncio.wait({task}, timeout=_SECONDS)
        return task.result()
    finally:
        task.cancel()


def lost_worker(step: str, error: Exception) -> RefitError:
    """Return the error to raise where a step did not answer, not even with an error of ours."""
    return RefitError(
        f"Step '{step}' of the refit failed on a worker ({type(error).__name__}: {error}); "
        "if its process has died, restart the engine."
    )

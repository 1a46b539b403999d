"""`RefitInFlight`: refits of NeMo RL's asynchronous vLLM workers with requests in flight."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)


class RefitInFlight:
    """Mixin for NeMo RL's asynchronous vLLM worker; it stands before upstream's class in the bases.

    Requests go on across a refit, with the keys and values that they have. Codes of an FP8 KV cache
    are right as long as their scales are in service, so a refit that changes a scale makes the
    requests compute theirs again, before the next step of the engine.
    """

    llm: Any
    _to_resume = False
    """Whether this class has paused the engine, which stays paused after a refit that failed."""

    async def update_weights_via_ipc_zmq_async(self) -> bool:
        """Refit through CUDA IPC."""
        return await self._between_steps(super().update_weights_via_ipc_zmq_async)  # type: ignore[misc]

    async def update_weights_from_collective_async(self) -> bool:
        """Refit through an NCCL broadcast."""
        return await self._between_steps(super().update_weights_from_collective_async)  # type: ignore[misc]

    async def _between_steps(self, update: Callable[[], Awaitable[bool]]) -> bool:
        """Refit while the engine pauses, and make requests start over if a KV scale has changed.

        The engine goes on after a refit that succeeded, and after one that failed before the first
        write. Otherwise it stays paused until a refit succeeds: a step of an engine that refuses to
        run would end its core, and hide the first error.

        Raises:
            RefitError: the KV cache could not be emptied; the engine stays paused.
        """
        llm = self.llm
        if llm is None or "fp8" not in str(llm.vllm_config.cache_config.cache_dtype):
            return await update()
        if not await llm.is_paused():
            await llm.pause_generation(mode="keep", clear_cache=False)
            self._to_resume = True
        done = await update()
        if done and any(await llm.collective_rpc("kv_codes_outdated")):
            from vllm_fp8rl.refit.sender.client import require_emptied

            logger.info(
                "fp8rl: a KV scale has changed; requests in flight compute their keys again."
            )
            emptied = await llm.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            require_emptied(emptied, "codes of older KV scales")
        if not done and not await self._may_run():
            logger.error("fp8rl: the refit failed; the engine stays paused until one succeeds.")
        elif self._to_resume:
            await llm.resume_generation()
            self._to_resume = False
        return done

    async def _may_run(self) -> bool:
        """Answer whether the engine can serve as before; an engine that is lost cannot."""
        try:
            return all(await self.llm.collective_rpc("may_run"))
        except Exception:
            logger.exception("fp8rl: the engine does not answer after a refit that failed.")
            return False

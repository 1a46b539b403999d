"""What replaces two methods of vLLM's ``EngineCore``; see :mod:`vllm_fp8rl.patches.ledger`.

``EngineCore`` schedules requests for the workers, in a process of its own or in the ``LLM``'s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm_fp8rl.engine.names import uses_fp8rl


def reset_and_tell(reset: Callable[..., bool]) -> Callable[..., bool]:
    """Replace ``reset_prefix_cache`` by one that tells the workers when all has been emptied."""

    def reset_prefix_cache(core: Any, *args: Any, **kwargs: Any) -> bool:
        emptied = reset(core, *args, **kwargs)
        if not emptied or not uses_fp8rl(core.vllm_config):
            return emptied
        options = inspect.signature(reset).bind(core, *args, **kwargs).arguments
        if options.get("reset_connector") or core.vllm_config.kv_transfer_config is None:
            from vllm_fp8rl.refit.receiver.worker import cache_emptied

            core.model_executor.collective_rpc(cache_emptied)
        return emptied

    return reset_prefix_cache


def rpc_unless_busy(rpc: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Replace ``collective_rpc`` by one that refuses steps that need an idle engine."""

    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not uses_fp8rl(core.vllm_config):
            return rpc(core, method, *args, **kwargs)
        from vllm_fp8rl.refit.receiver import worker

        busy = core.scheduler.has_unfinished_requests() and not core.is_scheduler_paused()
        if busy and method in worker.NEED_IDLE:
            return [worker.refusal(method)]
        if method != "reset_weights":
            return rpc(core, method, *args, **kwargs)
        core.model_executor.collective_rpc(worker.weights_going)
        answers = rpc(core, method, *args, **kwargs)
        core.model_executor.collective_rpc(worker.weights_gone)
        return answers

    return collective_rpc

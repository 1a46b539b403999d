"""Patches of vLLM's ``EngineCore``, the process that schedules requests for the workers.

Why: whether the KV cache still fits the weights and KV scales is known in the workers, but what
empties the cache, and which requests are in flight, only the engine core knows. Without word from
it a worker that took new KV scales could not tell whether cached codes of the old ones can still be
read, and scales sent by ``collective_rpc`` would change under a request.
How: two methods of the class are covered. ``reset_prefix_cache`` tells the workers when it has
emptied everything. ``collective_rpc`` answers with an error where a step of fp8rl would change what
requests in flight depend on, and tells the guards of ``reset_weights``. Both leave engines without
``quantization="fp8rl"`` alone.
Upstream: ``vllm/v1/engine/core.py``, 0.25.1 and 0.32.0; there is no door for it.
Until: vLLM tells workers or quantization methods about resets of the cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_fp8rl.names import NAME

_MARK = "fp8rl_patch"


def install() -> None:
    """Patch the class, once a process."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore.reset_prefix_cache, _MARK):
        for name, patch in (("reset_prefix_cache", _telling), ("collective_rpc", _refusing)):
            patched = functools.wraps(getattr(EngineCore, name))(patch(getattr(EngineCore, name)))
            setattr(patched, _MARK, True)
            setattr(EngineCore, name, patched)


def _telling(reset: Callable[..., bool]) -> Callable[..., bool]:
    def reset_prefix_cache(
        core: Any, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        emptied = reset(core, reset_running_requests, reset_connector)
        whole = reset_connector or core.vllm_config.kv_transfer_config is None
        if emptied and whole and _runs_fp8rl(core):
            from vllm_fp8rl.refit.worker import cache_emptied

            core.model_executor.collective_rpc(cache_emptied)
        return emptied

    return reset_prefix_cache


def _refusing(rpc: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not _runs_fp8rl(core):
            return rpc(core, method, *args, **kwargs)
        from vllm_fp8rl.refit import worker

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


def _runs_fp8rl(core: Any) -> bool:
    return core.vllm_config.model_config.quantization == NAME

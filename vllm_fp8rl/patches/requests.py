"""What replaces methods of vLLM that take requests and calls; see :mod:`vllm_fp8rl.patches.ledger`.

``EngineCore`` schedules requests for the workers, in a process of its own or in the ``LLM``'s. A
worker that refuses a step ends an engine that runs in a process of its own, and then no remedy
helps any more. So the workers are asked before a request reaches them, until they once could run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from fp8rl.errors import Fp8RLError, RefitError
from vllm_fp8rl.engine.names import uses_fp8rl

logger = init_logger("vllm.fp8rl")
_CHECK = "fp8rl_refit_check"
_START = "start_weight_update"
_UPDATES = (_START, "update_weights", "finish_weight_update")


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
    """Replace ``collective_rpc`` by one that refuses steps that need an idle engine.

    It also raises what a worker has refused of a weight update; see :func:`_update_weights`.
    """

    def collective_rpc(core: Any, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not uses_fp8rl(core.vllm_config):
            return rpc(core, method, *args, **kwargs)
        from vllm_fp8rl.refit.receiver import worker

        busy = core.scheduler.has_unfinished_requests() and not core.is_scheduler_paused()
        if busy and method in worker.NEED_IDLE:
            return [worker.refusal(method)]
        if method in _UPDATES and core.vllm_config.weight_transfer_config is not None:
            if busy and method == _START:
                worker.read_answer(worker.refusal(method))
            return _update_weights(core, rpc, method, *args, **kwargs)
        if method != "reset_weights":
            return rpc(core, method, *args, **kwargs)
        core.model_executor.collective_rpc(worker.weights_going)
        answers = rpc(core, method, *args, **kwargs)
        core.model_executor.collective_rpc(worker.weights_gone)
        return answers

    return collective_rpc


def _update_weights(
    core: Any, rpc: Callable[..., Any], method: str, *args: Any, **kwargs: Any
) -> Any:
    """Run a step of a weight update, and raise here, not in a worker, what is refused of it.

    vLLM's multiprocess executor reads answers up to the first error. Those of the ranks behind it
    would be taken for answers to the next call, and so on for ever. And a worker that was not the
    one to refuse would take the update for active still.
    """
    from vllm_fp8rl.refit.receiver import worker

    ask = core.model_executor.collective_rpc
    if all(ask(worker.weight_update_open)) == (method == _START):
        raise RefitError(
            "A weight update is under way; finish it, or end it by update_weights with "
            '{"end": true}, if its sender has died.'
            if method == _START
            else "No weight update is under way; call start_weight_update, and send all tensors."
        )
    answers = rpc(core, method, *args, **kwargs)
    try:
        for answer in ask(worker.weight_update_refused):
            worker.read_answer(answer)
    except Fp8RLError:
        ask(worker.end_weight_update)
        raise
    return answers


def ask_before_first(add: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``add_request`` by one that raises while the workers would refuse every step."""
    if inspect.iscoroutinefunction(add):

        async def add_request_async(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if _must_ask(engine):
                _take(engine, await engine.collective_rpc(_CHECK))
            return await add(engine, *args, **kwargs)

        return add_request_async

    def add_request(engine: Any, *args: Any, **kwargs: Any) -> Any:
        if _must_ask(engine):
            _take(engine, engine.collective_rpc(_CHECK))
        return add(engine, *args, **kwargs)

    return add_request


def _must_ask(engine: Any) -> bool:
    if not uses_fp8rl(engine.vllm_config):
        return False
    from vllm_fp8rl.refit.receiver.worker import has_refit_methods
    from vllm_fp8rl.refit.sender.client import Changes

    extension = engine.vllm_config.parallel_config.worker_extension_cls
    return not Changes.of(engine).could_run and has_refit_methods(extension)


def _take(engine: Any, answers: list[Any]) -> None:
    from vllm_fp8rl.refit.receiver.worker import read_answer
    from vllm_fp8rl.refit.sender.client import Changes

    try:
        for answer in answers:
            read_answer(answer)
    except Fp8RLError as error:
        logger.error("fp8rl: a request was refused: %s", error)  # AsyncLLM keeps the text back
        raise
    Changes.of(engine).could_run = True

"""`RolloutEngine`: the engine of one of NeMo RL's vLLM workers, and its new start in BF16.

vLLM fixes a model's quantization when it builds it, so BF16 rollouts in the middle of a run need
another engine. It is made inside the worker that had the first: whoever holds the worker's handle
(driver, trajectory collector, rollout actors) goes on using it.

The functions at the end run in a worker through Ray's ``__ray_call__``: the actor class is older
than our hooks and has no methods of ours.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch
import wrapt

from nemo_rl_ext.config.keys import rollouts_in_bf16
from nemo_rl_ext.driver.mismatch_guard import LOGGER
from nemo_rl_ext.workers.rollout import has_fp8_kv, is_ours

logger = logging.getLogger(LOGGER)

_ATTRIBUTE = "fp8rl_engine"
OWN_BYTES = 2 << 30
"""More than a CUDA context and the libraries of an engine's process take of the GPU."""


class GatedLLM(wrapt.ObjectProxy):
    """An ``AsyncLLM`` whose new requests wait while its engine is being replaced.

    It counts those that run, and outlives the engine behind it. All of it belongs to the event loop
    of the worker.

    Args:
        llm: the first engine.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        # wrapt keeps attributes of this prefix to itself.
        self._self_open = asyncio.Event()
        self._self_open.set()
        self._self_running = 0

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return int(self._self_running)

    def close(self) -> None:
        """Let new requests wait. Each holds one of the 1,000 places of a Ray actor meanwhile."""
        self._self_open.clear()

    def replace(self, llm: Any) -> None:
        """Put another engine behind the gate."""
        self.__wrapped__ = llm

    def open(self) -> None:
        """Let all that wait go on."""
        self._self_open.set()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """``AsyncLLM.generate``, behind the gate."""
        await self._self_open.wait()
        self._self_running += 1
        try:
            async for output in self.__wrapped__.generate(*args, **kwargs):
                yield output
        finally:
            self._self_running -= 1


class RolloutEngine:
    """What a worker needs to know of the engine that it made with ``quantization="fp8rl"``.

    Args:
        worker: a ``VllmGenerationWorkerImpl`` or ``VllmAsyncGenerationWorkerImpl``; its ``llm`` is
            put behind a :class:`GatedLLM` where it is asynchronous.
        create: upstream's ``_create_engine``.
        arguments: that upstream gave vLLM.
    """

    def __init__(
        self, worker: Any, create: Callable[[Any, dict[str, Any]], None], arguments: dict[str, Any]
    ) -> None:
        self._worker = worker
        self._create = create
        self._arguments = arguments
        self._retired: Any = None
        self.gate: GatedLLM | None = None
        if worker.cfg["vllm_cfg"]["async_engine"]:
            worker.llm = self.gate = GatedLLM(worker.llm)

    def restart_in_bf16(self) -> None:
        """End the engine and start one whose linears, experts and KV cache are in BF16.

        It has no weights yet, so the gate of an asynchronous engine stays as it is: closed.

        Raises:
            RuntimeError: requests are still running; the engine serves on.
        """
        arguments = rollouts_in_bf16(self._arguments)
        if self.gate is None:
            self._end(self._worker.llm)
        elif self.gate.running:
            raise RuntimeError(f"{self.gate.running} requests are still running in this engine.")
        else:
            self.gate.shutdown()
        self._worker.llm = None
        free_memory()
        if self._retired is not None:
            arguments = within_free_memory(arguments)
        # One thread of upstream's logs the metrics of whatever engine this process has.
        self._worker._start_vllm_metrics_logger = lambda: None
        self._create(self._worker, arguments)
        if self.gate is not None:
            self.gate.replace(self._worker.llm)
            self._worker.llm = self.gate

    def _end(self, llm: Any) -> None:
        """End a synchronous ``LLM``.

        One whose model lives in this process is put to sleep for good, its weights and KV cache
        discarded, and the next gets a process of its own: vLLM's memory pools cannot be given back
        while anything refers to them, and allow one engine a process.
        """
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if llm.llm_engine.is_sleeping():
            llm.wake_up()  # level 1 would keep a copy of the weights in the host's memory
        llm.collective_rpc("cleanup")  # NeMo RL's: closes the sockets of refits
        if isinstance(getattr(llm.llm_engine, "model_executor", None), UniProcExecutor):
            llm.sleep(level=2)
            self._retired = llm
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        else:
            llm.llm_engine.engine_core.shutdown()


def create_engine(
    worker: Any, create: Callable[[Any, dict[str, Any]], None], arguments: dict[str, Any]
) -> None:
    """A worker's ``_create_engine``, and what fp8rl adds to an engine of its own.

    An engine that needs KV scales and runs synchronously calibrates itself where a refit brings
    none (:class:`~nemo_rl_ext.workers.self_calibration.CalibratingLLM`).
    """
    kept = copy.deepcopy(arguments)  # upstream turns some of them into objects in place
    create(worker, arguments)
    asynchronous = worker.cfg["vllm_cfg"]["async_engine"]
    config = worker.llm.vllm_config if asynchronous else worker.llm.llm_engine.vllm_config
    if not is_ours(config):
        return
    setattr(worker, _ATTRIBUTE, RolloutEngine(worker, create, kept))
    if has_fp8_kv(config) and not asynchronous:
        from nemo_rl_ext.workers.self_calibration import CalibratingLLM

        worker.llm = CalibratingLLM(worker.llm)


def free_memory() -> None:
    """Give back what an engine that has ended held in this process, groups of ranks included.

    vLLM reads its environment anew after it.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def within_free_memory(arguments: dict[str, Any]) -> dict[str, Any]:
    """Engine arguments whose ``gpu_memory_utilization`` is not above what is free of the GPU.

    The first engine began on a GPU of its own; what it and the trainer cannot give back is missing,
    and so is what a process takes before vLLM looks (:data:`OWN_BYTES`).
    """
    asked = arguments.get("gpu_memory_utilization")
    if asked is None or not torch.cuda.is_available():
        return arguments
    free, total = torch.cuda.mem_get_info()
    allowed = math.floor(100 * max(free - OWN_BYTES, 0) / total) / 100
    if allowed >= asked:
        return arguments
    logger.warning(
        "fp8rl guard: gpu_memory_utilization is %.2f instead of %.2f, so the KV cache is smaller.",
        allowed,
        asked,
    )
    return {**arguments, "gpu_memory_utilization": allowed}


def hold_if_idle(worker: Any) -> bool:
    """Let new requests to a worker's engine wait, unless some are running; whether they wait."""
    gate = _gate(worker)
    if gate is None:
        return True  # synchronous: the driver asks for one thing at a time
    if gate.running:
        return False
    gate.close()
    return True


def release(worker: Any) -> None:
    """Let the requests go on that wait for a worker's engine."""
    gate = _gate(worker)
    if gate is not None:
        gate.open()


def _gate(worker: Any) -> GatedLLM | None:
    engine = getattr(worker, _ATTRIBUTE, None)
    return None if engine is None else engine.gate


def restart_in_bf16(worker: Any) -> float | None:
    """:meth:`RolloutEngine.restart_in_bf16` of a worker; seconds, None where it has no engine."""
    engine = getattr(worker, _ATTRIBUTE, None)
    if engine is None:
        return None
    started = time.perf_counter()
    engine.restart_in_bf16()
    return time.perf_counter() - started

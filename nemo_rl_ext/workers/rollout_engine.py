"""`RestartableEngine`: a vLLM worker of NeMo RL whose engine can start anew in BF16.

vLLM fixes a model's quantization when it builds it, so BF16 rollouts in the middle of a run need
another engine. It is made inside the worker that had the first one, so that whoever holds the
worker's handle (driver, trajectory collector, rollout actors) goes on using it.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import math
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
import wrapt

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.config.merge import rollouts_in_bf16
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

UPSTREAM_EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
"""Extension that :attr:`RestartableEngine.worker_extension` takes the place of."""

OWN_BYTES = 2 << 30
"""More GPU memory than a CUDA context and the libraries of an engine's process take."""


class GatedLLM(wrapt.ObjectProxy):
    """An ``AsyncLLM`` whose new requests wait while its engine is being replaced.

    It counts running requests and outlives the engine behind it. It is used only in the event loop
    of the worker.

    Args:
        llm: the first engine.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        # wrapt stores attributes with this prefix in the proxy.
        self._self_open = asyncio.Event()
        self._self_open.set()
        self._self_running = 0

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return int(self._self_running)

    def close(self) -> None:
        """Let new requests wait. Each holds one of a Ray actor's 1,000 slots meanwhile."""
        self._self_open.clear()

    def replace(self, llm: Any) -> None:
        """Put another engine behind the gate."""
        self.__wrapped__ = llm

    def open(self) -> None:
        """Let all waiting requests go on."""
        self._self_open.set()

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """``AsyncLLM.generate``, once the gate is open."""
        await self._self_open.wait()
        self._self_running += 1
        try:
            async for output in self.__wrapped__.generate(*args, **kwargs):
                yield output
        finally:
            self._self_running -= 1


class RestartableEngine:
    """Mixin for NeMo RL's vLLM workers, whose engines have ``quantization="fp8rl"``.

    It stands before upstream's class in the bases. The ranks of an engine that do not own it have
    no ``llm``, and the methods do nothing there.
    """

    worker_extension = "nemo_rl_ext.workers.vllm_extension.Fp8VllmWorkerExtension"
    """What vLLM adds to the bases of its own workers."""

    llm: Any
    cfg: Any
    _engine_arguments: dict[str, Any] | None = None
    _gate: GatedLLM | None = None
    _retired: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Create the engine, behind a gate where it is asynchronous.

        A synchronous engine that needs KV scales calibrates itself where a refit brings none
        (:class:`~nemo_rl_ext.workers.self_calibration.CalibratingLLM`).

        Raises:
            UnsupportedError: upstream chose an extension of vLLM's worker other than its plain one.
        """
        given = llm_kwargs.get("worker_extension_cls")
        if given not in (None, UPSTREAM_EXTENSION, self.worker_extension):
            raise UnsupportedError(
                f"This engine needs the worker extension '{given}', which FP8 rollouts would "
                "replace; set 'policy.generation.refit_transport' to null (CUDA IPC or NCCL "
                "broadcast)."
            )
        llm_kwargs = {
            **llm_kwargs,
            "worker_extension_cls": self.worker_extension,
            "distributed_executor_backend": self._executor(llm_kwargs),
        }
        # Upstream turns some arguments into objects in place.
        self._engine_arguments = copy.deepcopy(llm_kwargs)
        super()._create_engine(llm_kwargs)  # type: ignore[misc]
        if self.cfg["vllm_cfg"]["async_engine"]:
            self.llm = self._gate = GatedLLM(self.llm)
        elif "fp8" in str(self.llm.llm_engine.vllm_config.cache_config.cache_dtype):
            from nemo_rl_ext.workers.self_calibration import CalibratingLLM

            self.llm = CalibratingLLM(self.llm)

    def _executor(self, llm_kwargs: dict[str, Any]) -> Any:
        """Return how vLLM runs its workers: upstream's choice, or where it has none the config's.

        Upstream writes its choice over the user's key in ``vllm_kwargs``: "ray" for several GPUs,
        "uni" where data-parallel engines share experts, else None, which is vLLM's "uni". With "mp"
        the model has a process of its own, and the host's part of a step is shared by two.
        """
        chosen = llm_kwargs.get("distributed_executor_backend")
        asked = (self.cfg.get("vllm_kwargs") or {}).get("distributed_executor_backend")
        if asked is None or asked == chosen:
            return chosen
        if chosen is None and asked in ("mp", "uni"):
            return asked
        logger.warning(
            "'policy.generation.vllm_kwargs.distributed_executor_backend' is '%s', which this "
            "engine cannot have in NeMo RL; its workers run with '%s'.",
            asked,
            chosen or "uni",
        )
        return chosen

    def hold_if_idle(self) -> bool:
        """Let new requests wait, unless some are running; whether they wait."""
        if self._gate is None:
            return True  # synchronous: the driver makes one call at a time
        if self._gate.running:
            return False
        self._gate.close()
        return True

    def release(self) -> None:
        """Let waiting requests go on."""
        if self._gate is not None:
            self._gate.open()

    def restart_in_bf16(self) -> float | None:
        """End the engine and start one whose linears, experts and KV cache are in BF16.

        The new engine has no weights yet, so the gate of an asynchronous engine stays closed.

        Returns:
            Seconds; None where this rank owns no engine.

        Raises:
            RuntimeError: requests are still running; the engine serves on.
        """
        if self._engine_arguments is None:
            return None
        started = time.perf_counter()
        arguments = rollouts_in_bf16(self._engine_arguments)
        if self._gate is None:
            self._end(self.llm)
        elif self._gate.running:
            raise RuntimeError(f"{self._gate.running} requests are still running in this engine.")
        else:
            self._gate.shutdown()
        self.llm = None
        free_memory()
        if self._retired is not None:
            arguments = within_free_memory(arguments)
        # Upstream's thread already logs the metrics of whatever engine this process has.
        self._start_vllm_metrics_logger = lambda: None
        super()._create_engine(arguments)  # type: ignore[misc]
        if self._gate is not None:
            self._gate.replace(self.llm)
            self.llm = self._gate
        return time.perf_counter() - started

    def _end(self, llm: Any) -> None:
        """End a synchronous ``LLM``.

        One whose model lives in this process is put to sleep for good, its weights and KV cache
        discarded, and the next gets a process of its own: vLLM's memory pools cannot be given back
        while anything refers to them, and they allow one engine per process.
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


def free_memory() -> None:
    """Give back what an engine that has ended held in this process, including process groups.

    vLLM reads its environment anew after it.
    """
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def within_free_memory(arguments: dict[str, Any]) -> dict[str, Any]:
    """Lower ``gpu_memory_utilization`` of engine arguments to what is free on the GPU.

    The first engine began on an empty GPU; what it and the trainer cannot give back is missing now,
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

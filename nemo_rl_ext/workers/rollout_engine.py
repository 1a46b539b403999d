"""`RolloutEngine`: a vLLM worker of NeMo RL with an engine of fp8rl."""

from __future__ import annotations

import logging
from typing import Any

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

UPSTREAM_EXTENSION = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
"""Extension that :attr:`RolloutEngine.worker_extension` takes the place of."""


class RolloutEngine:
    """Mixin for NeMo RL's vLLM workers, whose engines have ``quantization="fp8rl"``.

    It stands before upstream's class in the bases.
    """

    worker_extension = "nemo_rl_ext.workers.vllm_extension.Fp8VllmWorkerExtension"
    """What vLLM adds to the bases of its own workers."""

    llm: Any
    cfg: Any

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Create the engine.

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
        super()._create_engine(llm_kwargs)  # type: ignore[misc]
        if self.cfg["vllm_cfg"]["async_engine"]:
            return
        if "fp8" in str(self.llm.llm_engine.vllm_config.cache_config.cache_dtype):
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

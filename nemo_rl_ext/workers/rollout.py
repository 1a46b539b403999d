"""What the vLLM workers' seam does; the rollout plugin is imported when it is used."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

from nemo_rl_ext.driver.mismatch_guard import LOGGER

logger = logging.getLogger(LOGGER)


def has_fp8_kv(vllm_config: Any) -> bool:
    """Whether an engine keeps its KV cache in FP8."""
    return "fp8" in str(vllm_config.cache_config.cache_dtype)


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine runs with ``quantization="fp8rl"``."""
    from vllm_fp8rl import NAME

    return getattr(getattr(vllm_config, "model_config", None), "quantization", None) == NAME


NOT_SENT = 1.0
"""What NeMo RL's Megatron worker sends in the place of a KV scale that the driver has not."""


class FencedSession:
    """A refit session whose batches may come on different CUDA streams.

    With an FP8 cache either all KV scales come or none. None come from a DTensor trainer, and none
    but placeholders with a refit before the driver's first calibration. The old scales then go, so
    that the engine refuses to run until it has calibrated itself
    (:class:`nemo_rl_ext.workers.self_calibration.CalibratingLLM`).

    Args:
        model: the worker's model.
        fp8_kv: whether the engine's cache is in FP8.
    """

    def __init__(self, model: torch.nn.Module, fp8_kv: bool) -> None:
        from vllm_fp8rl.refit import RefitSession

        self._session = RefitSession(model, expect_kv_scales=None if fp8_kv else False)
        self._finished = False
        self._written: torch.cuda.Event | None = None

    def __enter__(self) -> FencedSession:
        self._session.__enter__()
        return self

    def load(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        """Write a batch after the one before it, whatever stream that came on."""
        if torch.cuda.is_available() and self._written is not None:
            self._written.wait()
        self._session.load(batch)
        if torch.cuda.is_available():
            self._written = torch.cuda.Event()
            self._written.record()

    def finish(self) -> None:
        """Verify that all is there, and let the model run.

        Raises:
            RefitError: a tensor is missing; the model refuses to run.
        """
        self._finished = True
        if torch.cuda.is_available() and self._written is not None:
            self._written.wait()
        self._session.__exit__(None, None, None)
        self._forget_unless_sent()
        logger.info("fp8rl: %s", self._session.report)

    def _forget_unless_sent(self) -> None:
        from vllm_fp8rl.quantization.kv_cache import forget_kv_scales, kv_scale_state

        model, report = self._session.model, self._session.report
        assert report is not None
        if not report.kv_scales or set(kv_scale_state(model).values()) == {NOT_SENT}:
            forget_kv_scales(model)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            reason = kind.__name__ if kind is not None else "the sender did not finish"
            self._session.abandon(reason)

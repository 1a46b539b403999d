"""What the vLLM workers' seam does; the rollout plugin is imported when it is used."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any

import torch

from nemo_rl_ext.guard import LOGGER

logger = logging.getLogger(LOGGER)


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine runs with ``quantization="fp8rl"``."""
    from vllm_fp8rl import NAME

    return getattr(getattr(vllm_config, "model_config", None), "quantization", None) == NAME


class FencedSession:
    """A refit session whose batches may come on different CUDA streams.

    Args:
        model: the worker's model.
        expect_kv_scales: whether the engine's cache is in FP8.
    """

    def __init__(self, model: torch.nn.Module, expect_kv_scales: bool) -> None:
        from vllm_fp8rl.refit import RefitSession

        self._session = RefitSession(model, expect_kv_scales=expect_kv_scales)
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
        logger.info("fp8rl: %s", self._session.report)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            reason = kind.__name__ if kind is not None else "the sender did not finish"
            self._session.abandon(reason)

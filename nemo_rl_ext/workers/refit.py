"""`StreamedRefit`: one refit of a vLLM worker, whose batches may come on several CUDA streams."""

from __future__ import annotations

import logging
from types import TracebackType

import torch

from fp8rl.errors import Fp8RLError
from nemo_rl_ext.names import LOGGER

logger = logging.getLogger(LOGGER)

NOT_SENT = 1.0
"""What a trainer in NeMo RL sends for a KV scale that the driver does not have. Ours never give it
for all K and V (:func:`nemo_rl_ext.workers.training.unlike_placeholders`)."""


def kv_codes_outdated(model: torch.nn.Module) -> bool:
    """Tell whether a model must not run until its KV cache, requests' blocks too, is emptied."""
    from vllm_fp8rl.engine.rank_state import state_of

    return state_of(model).guard.cache_outdated


def may_run(model: torch.nn.Module) -> bool:
    """Tell whether the next step of a model would not be refused."""
    from vllm_fp8rl.engine.rank_state import state_of

    try:
        state_of(model).guard.require_ready()
    except Fp8RLError as error:
        logger.error("fp8rl: %s", error)
        return False
    return True


class StreamedRefit:
    """A refit session whose batches may come on different CUDA streams.

    With an FP8 cache either all KV scales come or none. A DTensor trainer in BF16 sends none, and a
    refit before the driver's first calibration sends placeholders only. The old scales are removed
    then, so that the engine refuses to run until it has calibrated itself
    (:class:`nemo_rl_ext.workers.self_calibration.CalibratingLLM`).
    """

    def __init__(self, model: torch.nn.Module, fp8_kv: bool) -> None:
        from vllm_fp8rl.refit import RefitSession

        self._model = model
        self._session = RefitSession(model, expect_kv_scales=None if fp8_kv else False)
        self._finished = False
        self._written: torch.cuda.Event | None = None

    def __enter__(self) -> StreamedRefit:
        self._session.__enter__()
        return self

    def load(self, batch: list[tuple[str, torch.Tensor]]) -> None:
        """Write a batch after the one before it, on whichever stream that one was written."""
        if torch.cuda.is_available() and self._written is not None:
            self._written.wait()
        self._session.load(batch)
        if torch.cuda.is_available():
            self._written = torch.cuda.Event()
            self._written.record()

    def finish(self) -> None:
        """Verify that everything has arrived, and let the model run.

        Raises:
            RefitError: a tensor is missing; the model refuses to run.
        """
        self._finished = True
        if torch.cuda.is_available() and self._written is not None:
            self._written.wait()
        self._session.__exit__(None, None, None)
        self._forget_scales_unless_sent()
        logger.info("fp8rl: %s", self._session.report)

    def _forget_scales_unless_sent(self) -> None:
        from vllm_fp8rl.kv.scales import forget_kv_scales, kv_scale_state

        report = self._session.report
        assert report is not None
        if not report.kv_scales or set(kv_scale_state(self._model).values()) == {NOT_SENT}:
            forget_kv_scales(self._model)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            reason = kind.__name__ if kind is not None else "the sender did not finish"
            self._session.abandon(reason)

"""vLLM's weight-transfer API (``WeightTransferConfig(backend=...)``) through a refit session.

vLLM's own engines load through its layerwise reload: they take an incomplete update for a complete
one, and serve whatever a broken-off one has left. Here ``start_weight_update`` opens a
:class:`~vllm_fp8rl.refit.receiver.session.RefitSession`, every ``update_weights`` is checked and
written in place, and ``finish_weight_update`` raises unless every tensor came; until then the model
refuses to run. There are three backends:

* ``fp8rl``: updates bring a file that each worker reads (``path``), or tensors (``payload``, packed
  by :class:`vllm_fp8rl.refit.transport.Sender` or :func:`vllm_fp8rl.refit.transport.pack`).
* ``fp8rl_nccl``, and ``fp8rl_ipc`` in :mod:`~vllm_fp8rl.refit.receiver.weight_transfer_ipc`: vLLM's
  own NCCL broadcast and CUDA IPC; the trainer's side is vLLM's, unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from fp8rl.errors import RefitError
from vllm_fp8rl.refit.receiver.files import read_files
from vllm_fp8rl.refit.receiver.session import RefitSession
from vllm_fp8rl.refit.receiver.worker import BREAK_OFF
from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES, Named, batches
from vllm_fp8rl.refit.transport import Payload, announced, received


class SessionEngine:
    """Handle a weight update through a refit session: the part that all backends share.

    vLLM's part has this object in the place of the model, and calls its :meth:`load_weights`.
    """

    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, self)  # type: ignore[call-arg]
        self._live_model = model
        self._session: RefitSession | None = None
        self._waiting: tuple[list[Named], torch.cuda.Stream | None] | None = None
        """Tensors that are loaded when the next have come, and the stream on which they come."""
        self._error: Exception | None = None
        """Of the last step; while a part comes in, why its rest is dropped."""

    @property
    def is_open(self) -> bool:
        """Whether an update is under way."""
        return self._session is not None

    def raise_error(self) -> None:
        """Raise the error of the last step, if it was refused.

        The steps do not raise it: the engine core asks all workers (``patches/requests.py``). An
        error that nobody has asked for is raised by the next step.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start_weight_update(self) -> None:
        """Open a session."""
        with self._kept_error():
            session = RefitSession(self._live_model, expect_kv_scales=None)
            self._session = session.__enter__()

    def update_weights(self, update_info: Any) -> None:
        """Receive a part of the weights; an error breaks the whole update off."""
        if update_info == BREAK_OFF:
            self._break_off("another worker refused it")
            raise RefitError("The weight update was broken off.")
        with self._kept_error():
            super().update_weights(update_info)  # type: ignore[misc]
            self.raise_error()

    def receive_weights(self, update_info: Any) -> None:
        """Check all that is announced, then receive it by vLLM's transport.

        What is refused is received all the same: a sender waits in each collective until this side
        has joined it, and would wait for ever if an error came first.
        """
        self._waiting = None
        try:
            lists = update_info.names, update_info.shapes, update_info.dtype_names
            self._opened().check(map(announced, *lists))
        except Exception as error:
            self._error = error
        super().receive_weights(update_info)  # type: ignore[misc]
        self._load_waiting()

    def load_weights(self, weights: list[Named]) -> None:
        """Load the tensors that came before, while these come in on a stream of their own.

        vLLM's transport begins to receive tensors, then calls this, then waits for its other
        stream. So the host, and the GPU, work on some tensors while the next travel.
        """
        self._load_waiting()
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._waiting = weights, stream

    def _load_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is None or self._error is not None:
            return
        weights, stream = waiting
        try:
            with torch.cuda.stream(stream):
                self._opened().load(weights)
        except Exception as error:
            self._error = error

    def finish_weight_update(self) -> None:
        """Require every tensor, and let the model run; the caller resets the prefix cache."""
        with self._kept_error():
            session, self._session = self._opened(), None
            session.__exit__(None, None, None)

    def _opened(self) -> RefitSession:
        if self._session is None:
            raise RefitError("No weight update is under way; call start_weight_update first.")
        return self._session

    @contextmanager
    def _kept_error(self) -> Iterator[None]:
        self.raise_error()
        try:
            yield
        except BaseException as error:
            self._break_off(type(error).__name__)
            if not isinstance(error, Exception):
                raise
            self._error = error

    def _break_off(self, reason: str) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.abandon(reason)


@dataclass
class Fp8RLInitInfo(WeightTransferInitInfo):
    """Information for the start: none is needed."""


@dataclass
class Fp8RLUpdateInfo(WeightTransferUpdateInfo):
    """One part of an update: either ``path`` or ``payload``."""

    path: str | None = None
    """A safetensors file, or a folder of them."""
    payload: Payload | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.payload is None):
            raise ValueError("Give either 'path' or 'payload' with a weight update.")


class Fp8RLTransferEngine(SessionEngine, WeightTransferEngine[Fp8RLInitInfo, Fp8RLUpdateInfo]):
    """Backend ``fp8rl``."""

    init_info_cls = Fp8RLInitInfo
    update_info_cls = Fp8RLUpdateInfo

    def init_transfer_engine(self, init_info: Fp8RLInitInfo) -> None:
        """Nothing to do."""

    def receive_weights(self, update_info: Fp8RLUpdateInfo) -> None:
        """Load a file or a payload."""
        if update_info.path is not None:
            stored = read_files(update_info.path, lambda coming: self._opened().check(coming))
            for batch in batches(stored, BATCH_BYTES, kept=True):
                self._opened().load(batch)
            return
        assert update_info.payload is not None
        with received(update_info.payload, lambda coming: self._opened().check(coming)) as tensors:
            self._opened().load(tensors.items())

    def shutdown(self) -> None:
        """Nothing to do."""

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Send tensors through the host (vLLM 0.25.1 asks an engine for this).

        Args:
            iterator: HF-named tensors.
            trainer_args: has ``update_weights``, a function that takes the ``update_info`` of each
                batch.
        """
        from vllm_fp8rl.refit.transport import pack

        for batch in batches(iterator, BATCH_BYTES):
            trainer_args["update_weights"]({"payload": pack(batch)})


class Fp8RLNcclTransferEngine(SessionEngine, NCCLWeightTransferEngine):
    """Backend ``fp8rl_nccl``."""

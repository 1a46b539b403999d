"""New weights and KV scales for a live engine: complete and checked, or refused.

Names load on first use: importing this package does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_fp8rl.refit.receiver.session import RefitSession
    from vllm_fp8rl.refit.receiver.worker import RefitMixin, RefitWorker
    from vllm_fp8rl.refit.sender.asynchronous import refit_async
    from vllm_fp8rl.refit.sender.client import drop_requests
    from vllm_fp8rl.refit.sender.synchronous import refit, refit_from_files, require_ready
    from vllm_fp8rl.refit.tensor_stream import BATCH_BYTES, batches

_HOME = {
    "BATCH_BYTES": "tensor_stream",
    "RefitMixin": "receiver.worker",
    "RefitSession": "receiver.session",
    "RefitWorker": "receiver.worker",
    "batches": "tensor_stream",
    "drop_requests": "sender.client",
    "refit": "sender.synchronous",
    "refit_async": "sender.asynchronous",
    "refit_from_files": "sender.synchronous",
    "require_ready": "sender.synchronous",
}

__all__ = [
    "BATCH_BYTES",
    "RefitMixin",
    "RefitSession",
    "RefitWorker",
    "batches",
    "drop_requests",
    "refit",
    "refit_async",
    "refit_from_files",
    "require_ready",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""New weights and KV scales for a live engine: complete and checked, or refused.

Names load on first use: importing this package does not import vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_fp8rl.refit.asynchronous import refit_async
    from vllm_fp8rl.refit.client import drop_requests
    from vllm_fp8rl.refit.intake import BATCH_BYTES, batches
    from vllm_fp8rl.refit.session import RefitSession
    from vllm_fp8rl.refit.synchronous import refit, refit_from_files, require_ready
    from vllm_fp8rl.refit.worker import RefitMixin, RefitWorker

_HOME = {
    "BATCH_BYTES": "intake",
    "RefitMixin": "worker",
    "RefitSession": "session",
    "RefitWorker": "worker",
    "batches": "intake",
    "drop_requests": "client",
    "refit": "synchronous",
    "refit_async": "asynchronous",
    "refit_from_files": "synchronous",
    "require_ready": "synchronous",
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

"""The names that this package registers with vLLM."""

from __future__ import annotations

from typing import Any

NAME = "fp8rl"
"""Name of the quantization method: ``LLM(..., quantization="fp8rl")``."""

EXTENSION = "vllm_fp8rl.refit.receiver.worker.RefitWorker"
"""For ``LLM(worker_extension_cls=...)``; needed where the engine core runs in its own process."""

WEIGHT_TRANSFER_BACKENDS = {
    "fp8rl": ("weight_transfer", "Fp8RLTransferEngine"),
    "fp8rl_nccl": ("weight_transfer", "Fp8RLNcclTransferEngine"),
    "fp8rl_ipc": ("weight_transfer_ipc", "Fp8RLIpcTransferEngine"),
}
"""Values of vLLM's ``WeightTransferConfig(backend=...)``, each with its module in
:mod:`vllm_fp8rl.refit.receiver` and its class there."""


def uses_fp8rl(engine: Any) -> bool:
    """Return whether the engine of a ``VllmConfig``, or of None, runs quantization ``fp8rl``."""
    quantization = None if engine is None else engine.quant_config
    return quantization is not None and quantization.get_name() == NAME

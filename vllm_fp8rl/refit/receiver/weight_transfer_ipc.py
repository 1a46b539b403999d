"""vLLM's CUDA IPC transport into a refit session; apart because vLLM 0.25 imports Ray for it."""

from __future__ import annotations

from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from vllm_fp8rl.refit.receiver.weight_transfer import SessionEngine


class Fp8RLIpcTransferEngine(SessionEngine, IPCWeightTransferEngine):
    """Backend ``fp8rl_ipc``."""

    def finish_weight_update(self) -> None:
        """Do as in the base, and give the trainer its buffer back."""
        try:
            super().finish_weight_update()
        finally:
            self.shutdown()

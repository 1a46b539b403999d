"""`Fp8VllmWorkerExtension`: a refit of vLLM's workers is a refit session of the vLLM plugin.

vLLM adds the class to the bases of its own worker, in the engine's processes
(``worker_extension_cls``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension

from fp8rl.errors import RefitError
from nemo_rl_ext.workers.refit import StreamedRefit, kv_codes_outdated, may_run


class Fp8VllmWorkerExtension(VllmInternalWorkerExtension):
    """Upstream's extension, whose weights go through a refit session.

    Plain ``load_weights`` cannot know whether a set of weights is complete. A session refuses
    half-updated weights, some of the KV scales, and NaN. It opens and ends with upstream's
    ``_weight_update_lifecycle``, which the CUDA-IPC and collective transports share.
    """

    _fp8rl_refit: StreamedRefit | None = None

    @contextmanager
    def _weight_update_lifecycle(self, transport: str) -> Iterator[Callable[[], None]]:
        refit = StreamedRefit(self.model_runner.model, self._uses_fp8_kv_cache())
        self._fp8rl_refit = refit
        try:
            with refit, super()._weight_update_lifecycle(transport) as finalize:

                def finish() -> None:
                    refit.finish()  # before upstream tells the sender that all is well
                    finalize()

                yield finish
        finally:
            self._fp8rl_refit = None

    def kv_codes_outdated(self) -> bool:
        """Answer whether the engine refuses to run until requests compute their keys again."""
        return kv_codes_outdated(self.model_runner.model)

    def may_run(self) -> bool:
        """Answer whether the next step of the engine would not be refused."""
        return may_run(self.model_runner.model)

    def _load_hf_weights(self, policy_weights: list[tuple[str, torch.Tensor]]) -> None:
        if self._fp8rl_refit is None:
            raise RefitError(
                "Weights arrived outside a refit, where nothing can check that they are complete; "
                "set 'policy.generation.refit_transport' to null (CUDA IPC or NCCL broadcast)."
            )
        self._fp8rl_refit.load(policy_weights)

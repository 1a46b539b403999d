"""A framework's worker extension together with the refit's steps.

``worker_extension_cls`` is one slot. A framework that fills it, such as verl, keeps its methods,
and the engine gets the refit's: ``LLM(..., worker_extension_cls="vllm_extension.Extension")``.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_fp8rl.refit.receiver.worker import RefitMixin


class BucketExtension:
    """Takes weights as verl's ``vLLMColocateWorkerExtension`` does: from buckets of bytes."""

    model_runner: Any

    def update_weights_from_bucket(
        self, bucket: torch.Tensor, places: dict[str, tuple[torch.Size, torch.dtype, int]]
    ) -> None:
        weights = []
        for name, (shape, dtype, offset) in places.items():
            size = dtype.itemsize * shape.numel()
            tensor = bucket[offset : offset + size].view(dtype=dtype).view(shape).clone()
            weights.append((name, tensor))
        self.model_runner.model.load_weights(weights)


class Extension(RefitMixin, BucketExtension):
    """Both. Methods of the mixin begin with ``fp8rl_``, so names do not meet."""

"""Record the experts that an in-process engine chooses, where vLLM itself does not return them."""

from __future__ import annotations

import torch


class RouteRecorder:
    """Record the experts of every token, layer by layer; run one request at a time, eagerly.

    vLLM's own capturer needs Triton from 0.31 on; this is bound by the same function.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # vLLM has it from 0.28 on, and experts on a CPU from 0.30 on.
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
            bind_routed_experts_capturer,
        )

        self._chosen: dict[int, list[torch.Tensor]] = {}
        bind_routed_experts_capturer(model, self)  # type: ignore[arg-type]

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Keep one forward's experts of one layer; vLLM's routers call it."""
        self._chosen.setdefault(layer_id, []).append(topk_ids.to("cpu", torch.int64, copy=True))

    def take(self) -> torch.Tensor:
        """Return the experts since the last call, int64 ``[tokens, MoE layers, top-k]``."""
        layers = [torch.cat(chosen) for _, chosen in sorted(self._chosen.items())]
        self._chosen.clear()
        return torch.stack(layers, dim=1)

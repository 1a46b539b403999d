"""Record the experts that an in-process engine chooses, where vLLM itself does not return them."""

from __future__ import annotations

import torch


class RouteRecorder:
    """Record the experts of every token, layer by layer, in the order of the forwards.

    vLLM returns them with ``enable_return_routed_experts``, but from 0.31 on only by a model runner
    that needs Triton. This takes the place of its own capturer and is bound by its own function, so
    it sees what vLLM would return. The engine must be eager. Tokens have no names here: run one
    request at a time, or requests of one length that start together.

    Args:
        model: the engine's model.

    Raises:
        ValueError: vLLM's, where a kernel hides the router.
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

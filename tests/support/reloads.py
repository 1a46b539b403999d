"""vLLM's own ways to load weights once more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from support.engine import Engine


def reload(engine: Engine, tensors: Any = None, **arguments: Any) -> None:
    """Call ``reload_weights`` of the worker, with tensors if there are any."""
    if tensors is not None:
        arguments["weights_iterator"] = tensors
    engine.llm.collective_rpc("reload_weights", kwargs=arguments)


def layerwise(engine: Engine, loads: Iterable[Any]) -> None:
    """As prime-rl and SkyRL, around several ``load_weights``."""
    config = engine.llm.llm_engine.vllm_config
    with torch.device("cpu"), set_current_vllm_config(config):
        initialize_layerwise_reload(engine.model)
        for tensors in loads:
            engine.model.load_weights(tensors)
        finalize_layerwise_reload(engine.model, config.model_config)

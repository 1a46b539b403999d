"""Linear layers and embeddings that vLLM builds without asking a quantization method, on a CPU.

See :mod:`vllm_fp8rl.patches.ledger`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_fp8rl.engine.names import uses_fp8rl


def keep_unpacked(process: Callable[..., None]) -> Callable[..., None]:
    """Replace ``process_weights_after_loading`` of a vLLM method by one that packs nothing.

    Only matrices of an engine of fp8rl on a CPU are kept; a packed convolution is one that vLLM's
    kernel needs. An embedding that serves as output projection too is one: vLLM would multiply with
    a packed copy of it, which no refit reaches.
    """

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if layer.weight.ndim == 2 and _on_a_cpu_of_ours():
            layer.cpu_linear = torch.nn.functional.linear
        else:
            process(self, layer)

    return process_weights_after_loading


def _on_a_cpu_of_ours() -> bool:
    from vllm.config import get_current_vllm_config_or_none  # imported where an engine is built

    engine = get_current_vllm_config_or_none()
    return uses_fp8rl(engine) and engine.device_config.device_type == "cpu"

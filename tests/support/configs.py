"""Values of small ``config.json`` files."""

from __future__ import annotations

from typing import Any


def moonlight(**changes: Any) -> dict[str, Any]:
    """Return values of a tiny Moonlight."""
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 2,
        "kv_lora_rank": 512,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **changes,
    }


QWEN3_5 = {
    "model_type": "qwen3_5",
    "vision_config": {},
    "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 4},
}

"""Make small random Qwen3 and Qwen3-MoE checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def make_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """Write a random Qwen3 with head size 128 in BF16 safetensors, without a tokenizer.

    Args:
        path: folder to write.
        seed: seed of the weights.
        changes: keys of ``Qwen3Config`` that differ from the defaults here.

    Returns:
        ``path``.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(Qwen3Config, Qwen3ForCausalLM, path, seed, changes)


def make_moe_checkpoint(path: Path, seed: int, **changes: Any) -> Path:
    """Write a random Qwen3-MoE in the same way, with six experts per layer and two per token.

    Args:
        path: folder to write.
        seed: seed of the weights.
        changes: keys of ``Qwen3MoeConfig`` that differ from the defaults here.

    Returns:
        ``path``.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {
        "moe_intermediate_size": 256,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    return _save(Qwen3MoeConfig, Qwen3MoeForCausalLM, path, seed, experts | changes)


def _save(config: Any, kind: Any, path: Path, seed: int, changes: dict[str, Any]) -> Path:
    torch.manual_seed(seed)
    model = kind(config(**(_SHAPE | changes)))
    for name, parameter in model.named_parameters():
        if name.endswith(
            "norm.weight"
        ):  # with all ones, a norm that is never refitted would go unnoticed
            parameter.data.uniform_(0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(path)
    return path

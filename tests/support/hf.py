"""Small random models of transformers, as a trainer in torch has them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fp8rl import PluginManager, Recipe
from torch_fp8rl import Conversion, convert

ALIGNED: dict[str, int] = {
    "hidden_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 256,
}
RAGGED = ALIGNED | {
    "hidden_size": 192,
    "head_dim": 64,
    "num_attention_heads": 3,
    "intermediate_size": 200,
}
"""k begins within a block of q, up within one of gate, and rows and columns have ragged ends."""
VOCAB, LENGTH = 64, 32


def hf_config(kind: str, shape: dict[str, int] = ALIGNED, **changes: Any) -> Any:
    """A config of two layers; Qwen3-MoE's have four experts, of which a token visits two."""
    values: dict[str, Any] = {
        **shape,
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "pad_token_id": 0,
    }
    if kind == "qwen3_moe":
        width = 128 if shape is ALIGNED else 72
        values |= {"moe_intermediate_size": width, "num_experts": 4, "num_experts_per_tok": 2}
        values |= {"norm_topk_prob": True}
    return AutoConfig.for_model(kind, **values | changes)


def hf_model(
    kind: str = "qwen3",
    shape: dict[str, int] = ALIGNED,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Any:
    """A model whose parameters are numbers of bfloat16, in ``dtype``."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(hf_config(kind, shape, **changes))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model.train()


def convert_alone(model: torch.nn.Module, recipe: Recipe | None = None, **more: Any) -> Conversion:
    """Convert without the plugins that are installed here."""
    return convert(model, recipe or Recipe(), plugins=PluginManager(discover=False), **more)


def ids(seed: int = 0, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, LENGTH), generator=generator)  # 0 embeds as zeros


def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
    tokens = ids(seed)
    return model(tokens, labels=tokens).loss

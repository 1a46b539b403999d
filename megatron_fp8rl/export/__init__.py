"""Hugging Face tensors out of and into a Megatron-Core GPT.

Llama, Qwen2, Qwen3 and Qwen3-MoE-style models are served: RMSNorm, gated MLPs or MoE layers of such
experts (sequential or grouped, with or without a shared expert), optional QK norm, optional biases,
tied or untied embeddings, any tensor, pipeline, virtual-pipeline or expert split, local or
TransformerEngine layer spec.
"""

from megatron_fp8rl.export.load import load_hf
from megatron_fp8rl.export.mapping import (
    ModelChunks,
    device_of,
    in_wrapper,
    path_of_adapter,
    unwrap_chunks,
)
from megatron_fp8rl.export.stream import export_hf, fp8_wire

__all__ = [
    "ModelChunks",
    "device_of",
    "export_hf",
    "fp8_wire",
    "in_wrapper",
    "load_hf",
    "path_of_adapter",
    "unwrap_chunks",
]

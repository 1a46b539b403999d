"""vLLM's gated delta net in float32 on a CPU, where its own kernel takes BF16 alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe


def compute_in_float32(patch: pytest.MonkeyPatch) -> None:
    """Let transformers' function compute the recurrence; all else stays vLLM's."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    # Before 0.32 vLLM packs float32 convolutions too, by a kernel for BF16 alone.
    for feature in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        patch.setattr(torch.cpu, feature, lambda: False)
    gdn_attention.register_cpu_gdn_attention_ops()
    patch.setattr(torch.ops.vllm, "cpu_gdn_attention_core", _core)


@contextmanager
def token_by_token() -> Iterator[None]:
    """A region in which transformers computes the recurrence without chunks: in another order."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe):
            step = partial(
                module.torch_recurrent_gated_delta_rule,
                initial_state=None,
                output_final_state=False,
            )
            patch.setattr(module, "torch_chunk_gated_delta_rule", step)
        yield


def _core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor, layer_name: Any
) -> None:
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # a dummy run
        return
    step = context.attn_metadata[layer.prefix]
    assert step.num_decodes == 0 and not step.has_initial_state.any()
    starts = step.non_spec_query_start_loc.tolist()
    for first, end in pairwise(starts):
        rows = slice(first, end)
        out[rows] = _one_prompt(layer, mixed_qkv[rows], b[rows], a[rows])


def _one_prompt(
    layer: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> torch.Tensor:
    weight = layer.conv1d.weight
    rows, width = mixed_qkv.shape[1], weight.shape[-1]
    padded = F.pad(mixed_qkv.t(), (width - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight.view(rows, 1, width), groups=rows)).t()
    ranks = layer.tp_size
    sizes = [size // ranks for size in (layer.key_dim, layer.key_dim, layer.value_dim)]
    query, key, value = (part[None] for part in mixed.split(sizes, dim=-1))
    query, key = (part.unflatten(-1, (layer.num_k_heads // ranks, -1)) for part in (query, key))
    value = value.unflatten(-1, (layer.num_v_heads // ranks, -1))
    repeats = layer.num_v_heads // layer.num_k_heads
    query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
    decay = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    result, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        query, key, value, g=decay[None], beta=b.sigmoid()[None], use_qk_l2norm_in_kernel=True
    )
    return result[0]

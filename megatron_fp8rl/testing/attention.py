"""Causal attention that does not round its scores, through torch."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from fp8rl.errors import UnsupportedError


class UnroundedAttention(DotProductAttention):
    """``DotProductAttention`` with scores in float32, on a GPU torch's flash attention.

    Megatron's own rounds scores and probabilities to BF16. Flash attention kernels round no scores,
    and vLLM's CPU kernel neither, so this one is closer to any rollout. Probabilities are rounded
    on a GPU alone. It has no dropout and takes no mask: the causal one is meant.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend with ``[s, b, heads, d]``; return ``[s, b, heads * d]`` in the query's dtype."""
        if attention_mask is not None or packed_seq_params is not None:
            raise UnsupportedError(
                "UnroundedAttention serves causal attention alone; call the model without "
                "attention_mask and packed_seq_params."
            )
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if query.is_cuda:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True
            )
            return out.permute(2, 0, 1, 3).flatten(2)
        q, k, v = q.float(), k.float(), v.float()
        groups = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * self.softmax_scale
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        out = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return out.to(query.dtype).permute(2, 0, 1, 3).flatten(2)

"""Attention over an FP8 or INT8 cache, written out in float64."""

from __future__ import annotations

import torch

from fp8rl.numerics import FP8_DTYPE


def fake_quantized(x: torch.Tensor, scale: float) -> torch.Tensor:
    """float64 values that an E4M3 cache with this scale holds for ``x``."""
    codes = (x.detach().float() / scale).clamp(-448, 448).to(FP8_DTYPE)
    return codes.double() * scale


def int8_rounded(x: torch.Tensor) -> torch.Tensor:
    """float64 values that an INT8 cache with a scale for each token and head holds for ``x``."""
    x = x.detach().double()
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.floor(x / step + 0.5) * step


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64, from ``[s, b, heads, size]`` to ``[s, b, heads * size]``."""
    q, k, v = (x.detach().double().permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
    out = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
    return out.permute(2, 0, 1, 3).flatten(2)

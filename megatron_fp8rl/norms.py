"""The norm inside a TransformerEngine layer, computed as TransformerEngine does."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import layer_norm, rms_norm


def normalize(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply the norm of a LayerNormLinear, in float32 inside.

    A zero-centered weight gets its 1 in float32, as in TransformerEngine's kernel, in vLLM and in
    transformers: in BF16 the sum would lose every part of the weight below 2^-8.

    Args:
        module: holds ``layer_norm_weight`` (and ``layer_norm_bias``) of shape ``[hidden]``,
            ``zero_centered_gamma``, ``normalization`` and ``eps``.
        x: ``[.., hidden]``.

    Returns:
        A tensor in the shape and dtype of ``x``.
    """
    weight, shape, eps = module.layer_norm_weight, module.layer_norm_weight.shape, module.eps
    dtype = x.dtype
    if module.zero_centered_gamma:
        x, weight = x.float(), 1 + weight.float()
    weight = weight.to(x.dtype)
    if module.normalization == "RMSNorm":
        return rms_norm(x, shape, weight, eps).to(dtype)
    return layer_norm(x, shape, weight, module.layer_norm_bias.to(x.dtype), eps).to(dtype)

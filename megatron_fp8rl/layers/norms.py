"""The norm inside a TransformerEngine layer, computed as TransformerEngine or the rollout does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from fp8rl.kernels import implementation


def normalize(module: Any, x: torch.Tensor, *, exact: bool = False) -> torch.Tensor:
    """Apply the norm of a LayerNormLinear, in float32 inside.

    A zero-centered weight gets its 1 in float32, as in TransformerEngine's kernel, in vLLM and in
    transformers: in BF16 the sum would lose every part of the weight below 2^-8.

    Args:
        module: holds ``layer_norm_weight`` (and ``layer_norm_bias``) of shape ``[hidden]``,
            ``zero_centered_gamma``, ``normalization`` and ``eps``.
        exact: by the kernel that the rollout calls too; an RMSNorm that is not zero-centered.
    """
    if exact:
        return SharedRMSNorm.apply(x, module.layer_norm_weight, module.eps)
    weight, shape, eps = module.layer_norm_weight, module.layer_norm_weight.shape, module.eps
    dtype = x.dtype
    if module.zero_centered_gamma:
        x, weight = x.float(), 1 + weight.float()
    weight = weight.to(x.dtype)
    if module.normalization == "RMSNorm":
        return rms_norm(x, shape, weight, eps).to(dtype)
    return layer_norm(x, shape, weight, module.layer_norm_bias.to(x.dtype), eps).to(dtype)


class SharedRMSNorm(torch.autograd.Function):
    """:func:`fp8rl.kernels.norm.rms_norm`, with the gradients of torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        kernels = implementation(x, "norm")
        if x.is_cpu:
            y, roots = kernels.rms_norm(x, weight, epsilon), None
        else:
            y, roots = kernels.rms_norm_and_roots(x, weight, epsilon)
        ctx.save_for_backward(x, weight, roots)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, roots = ctx.saved_tensors
        if roots is not None:
            found = torch.ops.aten._fused_rms_norm_backward(
                grads[0].contiguous(), x.contiguous(), weight.shape, roots, weight, [True, True]
            )
            return (*found, None)
        x, weight = (saved.detach().requires_grad_() for saved in (x, weight))
        with torch.enable_grad():
            y = rms_norm(x, weight.shape, weight, ctx.epsilon)
        return (*torch.autograd.grad(y, (x, weight), grads), None)

"""A gated MLP whose activation and quantization are one kernel, forward and backward.

Apart, SwiGLU's output and the gradient of its input are written to memory in BF16 and read again by
the quantization in front of the next product; together they are the largest tensors of a layer.
Here the second linear takes gate and up and quantizes their product as it computes it, and in
backward it leaves the gradient of gate and up as codes for the first linear (:class:`Link`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch.nn.modules.module import _has_any_global_hook

from fp8rl.numerics import GROUP
from megatron_fp8rl.linear import Fp8ColumnParallelLinear, Fp8RowParallelLinear, Link


class Fp8SwigluMLP(MLP):
    """``MLP`` with both linears in FP8; made by ``convert``, never built directly.

    A forward is megatron's own where it is not BF16, scales tokens, somebody watches the linears
    with hooks, or the module has changed so that it could not be fused any more.
    """

    def forward(self, hidden_states: torch.Tensor, per_token_scale: Any = None, **kwargs: Any):
        # A layer names arguments that say nothing (``padding_mask=None``).
        asked = any(value is not None for value in (per_token_scale, *kwargs.values()))
        bf16 = hidden_states.dtype == torch.bfloat16  # the kernels' dtype
        if asked or not bf16 or not _is_swiglu(self) or _is_watched(self):
            return super().forward(hidden_states, per_token_scale, **kwargs)
        link = Link()
        gate_up, _ = _call(self.linear_fc1, link, hidden_states)
        return _call(self.linear_fc2, link, gate_up)


def can_fuse(module: Any) -> bool:
    """Whether ``module`` is an MLP that asks for a fused SwiGLU and whose linears are FP8 ones.

    Without ``config.bias_activation_fusion`` megatron rounds ``silu(gate)`` to BF16, so the results
    would differ from those of the unconverted model by more than FP8.
    """
    return type(module) is MLP and _is_swiglu(module)


def fuse(module: Any) -> None:
    """Fuse an MLP for which :func:`can_fuse` says yes; undone by :func:`separate`."""
    module.__class__ = Fp8SwigluMLP


def is_fused(module: Any) -> bool:
    """Whether :func:`fuse` was called on ``module``."""
    return type(module) is Fp8SwigluMLP


def separate(module: Any) -> None:
    """Give a fused MLP its upstream class back."""
    module.__class__ = MLP


def _is_swiglu(mlp: Any) -> bool:
    config, fc1, fc2 = mlp.config, mlp.linear_fc1, mlp.linear_fc2
    plain = not (
        config.use_te_activation_func
        or config.activation_func_fp8_input_store
        or config.cpu_offloading
        or config.activation_func_clamp_value is not None
        or config.glu_linear_offset
    )
    return (
        bool(config.bias_activation_fusion and config.gated_linear_unit and plain)
        and mlp.activation_func is torch.nn.functional.silu
        and type(fc1) is Fp8ColumnParallelLinear
        and type(fc2) is Fp8RowParallelLinear
        and fc1.bias is None
        and not fc1.gather_output
        and fc2.input_is_parallel
        and fc2.weight.shape[1] % GROUP == 0
    )


def _is_watched(mlp: Any) -> bool:
    """Whether somebody would see gate and up where the activation should be, or the placeholder of
    a gradient where that should be."""
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    return (
        (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled())
        or _has_any_global_hook()
        or any(
            module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
            for module in (fc1, fc2)
        )
        or not all(map(_looks_at_parameters, fc2._forward_pre_hooks.values()))
    )


def _looks_at_parameters(hook: Any) -> bool:
    """It is DDP's, which waits for the module's parameters (``overlap_param_gather``)."""
    return str(getattr(hook, "__module__", "")).startswith("megatron.core.distributed.")


def _call(linear: Any, link: Link, x: torch.Tensor) -> Any:
    linear.fp8_link = link
    try:
        return linear(x)
    finally:
        del linear.fp8_link

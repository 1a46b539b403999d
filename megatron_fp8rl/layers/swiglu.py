"""A gated MLP whose activation and quantization are one kernel, forward and backward.

Without the fusion SwiGLU's output and the gradient of its input, the largest tensors of a layer,
are written to memory in BF16 and read again by the quantization in front of the next product.
Here the second linear takes gate and up and quantizes their product as it computes it, and in
backward it leaves the gradient of gate and up as codes for the first linear (:class:`Link`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch.nn.modules.module import _has_any_global_hook

from fp8rl.errors import UnsupportedError
from fp8rl.training.linear import Link
from megatron_fp8rl.layers.linear import Fp8Module


class Fp8SwigluMLP(Fp8Module, MLP):
    """``MLP`` with both linears in FP8; made by ``convert``, never built directly.

    A forward is megatron's own if it is not BF16, scales tokens, hooks watch the linears, or the
    module has changed so that it could not be fused any more. With ``exact`` it raises
    UnsupportedError then.
    """

    upstream_class = MLP

    def forward(self, hidden_states: torch.Tensor, per_token_scale: Any = None, **kwargs: Any):
        # A layer passes arguments that request nothing (``padding_mask=None``).
        asked = any(value is not None for value in (per_token_scale, *kwargs.values()))
        bf16 = hidden_states.dtype == torch.bfloat16  # the kernels' dtype
        if asked or not bf16 or not _is_swiglu(self) or _is_watched(self):
            if self.fp8_setup.recipe.exact:
                raise UnsupportedError(
                    "exact needs the fused SwiGLU, and hooks on the linear layers of an MLP, "
                    "anomaly detection or another dtype than bfloat16 would take it apart; remove "
                    "them, or set exact to false in the recipe."
                )
            return super().forward(hidden_states, per_token_scale, **kwargs)
        link = Link()
        gate_up, _ = _call(self.linear_fc1, link, hidden_states)
        return _call(self.linear_fc2, link, gate_up)


def can_fuse(module: Any) -> bool:
    """Tell whether ``module`` is an MLP whose config requests a fused SwiGLU and whose linears run
    in FP8.

    Without ``config.bias_activation_fusion`` megatron rounds ``silu(gate)`` to BF16, so the results
    would differ from those of the unconverted model by more than FP8.
    """
    return type(module) is MLP and _is_swiglu(module)


def requests_swiglu(mlp: Any) -> bool:
    """Tell whether the options of an MLP request a fused SwiGLU."""
    config = mlp.config
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
    )


def _is_swiglu(mlp: Any) -> bool:
    fc1, fc2 = mlp.linear_fc1, mlp.linear_fc2
    return (
        requests_swiglu(mlp)
        # Its own attribute: a subclass that somebody has put in its place may look at its input.
        and vars(type(fc1)).get("in_gated_mlp") == "first"
        and vars(type(fc2)).get("in_gated_mlp") == "second"
        # TransformerEngine has an empty tensor in the place of a bias, and neither of the options.
        and (fc1.bias is None or not fc1.bias.numel())
        and not getattr(fc1, "gather_output", False)
        and getattr(fc2, "input_is_parallel", True)
    )


def _is_watched(mlp: Any) -> bool:
    """Tell whether a hook would see gate and up in place of the activation, or the placeholder in
    place of a gradient."""
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
    """Tell whether a hook is DDP's, which waits for parameters (``overlap_param_gather``)."""
    return str(getattr(hook, "__module__", "")).startswith("megatron.core.distributed.")


def _call(linear: Any, link: Link, x: torch.Tensor) -> Any:
    linear.fp8_link = link
    try:
        return linear(x)
    finally:
        del linear.fp8_link

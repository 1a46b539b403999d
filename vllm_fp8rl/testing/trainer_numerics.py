"""Engine options with which vLLM on a CPU rounds as a trainer does, through vLLM's public options.

vLLM's norms on a CPU round to BF16 before and after the product with their weight and read the
unrounded sum of residual and branch; torch's ``rms_norm``, which Megatron's local layers call,
rounds once and reads the rounded sum. vLLM's rotary kernel rounds once, Megatron's rotation rounds
every product. On a CPU without AVX512-BF16 vLLM's kernels drop the lower bits instead of rounding
them; those of attention and SwiGLU still do so with these options.
Such a difference in the last bit of a BF16 value flips FP8 codes, and the flips spread through all
layers (docs/measurements/mismatch.md).
"""

from __future__ import annotations

from typing import Any

import torch

PROVIDER = "fp8rl_torch"
"""Name of the norms in vLLM's ``ir_op_priority``."""


def engine_options() -> dict[str, Any]:
    """Register norms with vLLM and return arguments for ``vllm.LLM`` that select them.

    The engine must run in this process, eagerly. The norms stay selected in the process until
    another engine is built.
    """
    _register_norms()
    return {
        "ir_op_priority": {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]},
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }


def _register_norms() -> None:
    from vllm.ir.ops import fused_add_rms_norm, rms_norm

    if PROVIDER in rms_norm.impls:
        return

    rms_norm.register_impl(PROVIDER, supports_args=_whole)(_rms_norm)
    fused_add_rms_norm.register_impl(PROVIDER, supports_args=_whole_sum)(_add_rms_norm)


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x_residual + x
    return _rms_norm(total, weight, epsilon), total


def _whole(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return variance_size is None


def _whole_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return variance_size is None

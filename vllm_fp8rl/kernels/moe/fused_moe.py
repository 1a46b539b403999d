"""vLLM's own fused MoE kernels, over expert weights that are written in place.

As in :mod:`vllm_fp8rl.kernels.linear.block_gemm`, vLLM's processing of weights after loading is
left out: Triton and DeepGEMM both read codes ``[experts, N, K]`` and float32 scales ``[experts,
N/128, K/128]`` (``vllm/model_executor/layers/fused_moe/experts``). The kernel object is
created once, over the layer's own scale tensors, because captured graphs keep the addresses of
those tensors.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm import envs
from vllm.distributed.parallel_state import get_dp_group
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.deep_gemm_utils import compute_aligned_M_and_alignment
from vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe import (
    TritonOrDeepGemmExperts,
)
from vllm.model_executor.layers.fused_moe.oracle.fp8 import (
    Fp8MoeBackend,
    backend_to_kernel_cls,
    make_fp8_moe_kernel,
    make_fp8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    make_unquantized_moe_kernel,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    backend_to_kernel_cls as plain_backend_to_kernel_cls,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
)
from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import BLOCK, GROUP
from fp8rl.recipe import Recipe
from vllm_fp8rl.compat import known_options, one_class
from vllm_fp8rl.kernels.linear.block_gemm import require_served_gpu
from vllm_fp8rl.kernels.moe.settings import ACTIVATION_SCALES_ENV
from vllm_fp8rl.warmup import NO_NVCC, KernelWarmup, find_nvcc

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

_BACKENDS = {"triton": Fp8MoeBackend.TRITON, "deep_gemm": Fp8MoeBackend.DEEPGEMM}
"""Values of vLLM's ``moe_backend``, in vLLM's own order for block FP8 on Hopper. vLLM's DeepGEMM
backend runs Triton too, for fewer than 128 tokens or experts of at most 512 columns."""
_NARROW = 512
"""The most columns of experts that vLLM does not give to DeepGEMM (``_valid_deep_gemm``)."""
_MANY_ROWS = 96
"""Rows of an expert, on average, from which on DeepGEMM is the quicker one
(``docs/measurements/experts.md``)."""

ConfiguredKernel = tuple[FusedMoEQuantConfig, mk.FusedMoEKernel]


class ExpertsByRows(TritonOrDeepGemmExperts):
    """DeepGEMM where experts have many rows each, as of prompts, and Triton else, as in decode.

    DeepGEMM's tiles have 128 rows of one expert. A decode step gives an expert a few rows, which
    Triton's tiles of 16 to 64 rows fit. On Hopper vLLM by itself runs Triton for all, without
    expert parallel.
    """

    def _select_experts_impl(
        self, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
    ) -> mk.FusedMoEExpertsModular:
        rows = hidden_states.shape[0] * self.moe_config.experts_per_token
        if rows < _MANY_ROWS * self.moe_config.num_experts:
            return self.fallback_experts
        return super()._select_experts_impl(hidden_states, w1, w2)


def delegate_experts(layer: RoutedExperts, moe: FusedMoEConfig, recipe: Recipe) -> ConfiguredKernel:
    """Return the fastest of vLLM's kernels that runs FP8 experts, or the one of ``moe_backend``.

    Raises:
        UnsupportedError: the GPU, the backend or the shape is not served, or vLLM
            would not use the recipe's format of activation scales in this process.
    """
    require_served_gpu(recipe)
    if moe.hidden_dim % GROUP:
        raise UnsupportedError(
            f"vLLM's FP8 experts need a hidden size in multiples of {GROUP}, not "
            f"{moe.hidden_dim}; pin the experts to BF16 with pins.kinds: [experts]."
        )
    _require_activation_scales(recipe)
    reasons = []
    for name, kernel in _kernels(moe):
        reason = _unsupported_reason(name, kernel, moe)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        backend = _BACKENDS[name]
        config = make_fp8_moe_quant_config(
            backend,
            w1_scale=layer.w13_weight_scale_inv,
            w2_scale=layer.w2_weight_scale_inv,
            a1_scale=None,
            a2_scale=None,
            block_shape=list(BLOCK),
        )
        routing = layer._expert_routing_tables()
        options = known_options(make_fp8_moe_kernel, layer=layer)
        return config, make_fp8_moe_kernel(config, moe, kernel, backend, routing, **options)
    raise UnsupportedError(
        f"No FP8 kernel takes these experts ({'; '.join(reasons)}); pin them to BF16 with "
        "pins.kinds: [experts]."
    )


def warm_up_deep_gemm(layer: RoutedExperts, moe: FusedMoEConfig, warmup: KernelWarmup) -> None:
    """Have DeepGEMM's kernels for a layer's experts compiled ahead."""
    # Rows as vLLM's own warm-up counts them: the tokens of all data-parallel ranks, padded.
    rows, _ = compute_aligned_M_and_alignment(
        M=warmup.rows * get_dp_group().world_size,
        num_topk=moe.experts_per_token,
        local_num_experts=moe.num_local_experts,
        alignment=BLOCK[0],
        expert_tokens_meta=None,
    )
    for stack in (layer.w13_weight, layer.w2_weight):
        experts, out_features, in_features = stack.shape
        warmup.add(out_features, in_features, rows, experts)


def delegate_plain_experts(layer: RoutedExperts, moe: FusedMoEConfig) -> ConfiguredKernel:
    """Return vLLM's Triton kernel for unquantized experts; its others need repacked weights."""
    if moe.moe_backend not in ("auto", *_BACKENDS):
        _refuse(moe.moe_backend)
    kind = one_class(plain_backend_to_kernel_cls(UnquantizedMoeBackend.TRITON))
    reason = _kernel_reason(kind, moe, None, None)
    if reason is not None:
        raise UnsupportedError(f"No BF16 kernel takes these experts (triton: {reason}).")
    config = FusedMoEQuantConfig.make()
    kernel = make_unquantized_moe_kernel(
        config, moe, UnquantizedMoeBackend.TRITON, kind, layer._expert_routing_tables()
    )
    return config, kernel


def _kernels(moe: FusedMoEConfig) -> list[tuple[str, type[mk.FusedMoEExperts]]]:
    """Return vLLM's kernels with the name of their backend, the one to prefer first."""
    asked = moe.moe_backend
    if asked not in ("auto", *_BACKENDS):
        _refuse(asked)
    names = _BACKENDS if asked == "auto" else (asked,)
    found = [(name, one_class(backend_to_kernel_cls(_BACKENDS[name]))) for name in names]
    # vLLM's DeepGEMM backend never changes kernels where scales are powers of two. A dispatcher
    # that counts the tokens of local experts has workspaces of DeepGEMM's size, too small for
    # Triton.
    if (
        asked == "auto"
        and moe.intermediate_size_per_partition > _NARROW
        and not moe.moe_parallel_config.use_all2all_kernels
        and not is_deep_gemm_e8m0_used()
    ):
        found.insert(0, ("deep_gemm", ExpertsByRows))
    return found


def _refuse(backend: str) -> None:
    raise UnsupportedError(
        f"moe_backend='{backend}' cannot run experts that are refitted in place; set it to "
        f"{', '.join(_BACKENDS)} or auto."
    )


def _unsupported_reason(
    name: str, kernel: type[mk.FusedMoEExperts], moe: FusedMoEConfig
) -> str | None:
    if name == "deep_gemm" and not envs.VLLM_MOE_USE_DEEP_GEMM:
        return "VLLM_MOE_USE_DEEP_GEMM is 0"
    if name == "deep_gemm" and find_nvcc(os.environ) is None:  # vLLM does not check it
        return NO_NVCC
    return _kernel_reason(kernel, moe, kFp8Static128BlockSym, kFp8Dynamic128Sym)


def _kernel_reason(
    kernel: type[mk.FusedMoEExperts],
    moe: FusedMoEConfig,
    weights: QuantKey | None,
    activations: QuantKey | None,
) -> str | None:
    """Return why a kernel does not take these experts, or None."""
    if issubclass(kernel, mk.FusedMoEExpertsMonolithic):
        return "it chooses the experts itself, which hides the routes that router replay needs"
    supported, reason = kernel.is_supported_config(
        kernel, moe, weights, activations, mk.FusedMoEActivationFormat.Standard
    )
    return None if supported else str(reason)


def _require_activation_scales(recipe: Recipe) -> None:
    wanted = recipe.activations.scale_format == "pow2"
    if is_deep_gemm_e8m0_used() != wanted:
        raise UnsupportedError(
            f"vLLM's experts would not quantize activations with {recipe.activations.scale_format} "
            f"scales in this process: {ACTIVATION_SCALES_ENV} was read before, or DeepGEMM is off; "
            "start the engine in a process of its own, with DeepGEMM for pow2."
        )

"""Router and experts of an engine that computes exactly what the trainer does.

vLLM chooses experts by a kernel of its own and, for fewer rows, other products than DeepGEMM's. The
methods here take the whole mixture: vLLM's layer hands a *monolithic* method the router's logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.deep_gemm_utils import deepgemm_moe_permute
from vllm.utils import deep_gemm

from fp8rl.errors import UnsupportedError
from fp8rl.kernels.experts import choose_experts, router_logits, sum_rows
from fp8rl.numerics import BLOCK
from fp8rl.numerics.triton.activations import quantize_rows
from vllm_fp8rl.kernels.moe.fused_moe import warm_up_deep_gemm
from vllm_fp8rl.quantization.linear import RefitLinearMethod
from vllm_fp8rl.quantization.moe import Fp8RLMoEMethod

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class ExactRouterMethod(RefitLinearMethod):
    """A router by the kernel that the trainer calls too."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits ``[tokens, experts]`` of ``x`` ``[tokens, hidden]``."""
        return router_logits(x, layer.weight.data)


class ExactMoEMethod(Fp8RLMoEMethod):
    """Block-FP8 experts by DeepGEMM, for any number of tokens."""

    @property
    def is_monolithic(self) -> bool:
        return True

    def _make_kernels(self, layer: RoutedExperts, device: torch.device, dtype: torch.dtype) -> None:
        layout = self.grids.layout
        if layout.padded != layout.intermediate or layout.hidden % BLOCK[1]:
            raise UnsupportedError(
                f"exact needs experts with multiples of {BLOCK[0]} features, not "
                f"{layout.hidden} and {layout.intermediate}; choose another model, or set exact "
                "to false in the recipe."
            )
        warm_up_deep_gemm(layer, self.moe, self.state.warmup)

    def apply_monolithic(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mixture of ``x`` ``[tokens, hidden]``; logits as of the router's method."""
        weights, chosen = choose_experts(router_logits, layer.top_k)
        scale_format = self.state.recipe.activations.scale_format
        codes, by_group = quantize_rows(x, scale_format)
        codes, scales, experts, places, alignment = deepgemm_moe_permute(
            aq=codes,
            aq_scale=by_group.t()[: len(x)].contiguous(),  # its kernel takes no other strides
            topk_ids=chosen,
            local_num_experts=layer.local_num_experts,
            expert_map=None,
            expert_tokens_meta=None,
            aq_out=None,
        )
        with deep_gemm.mk_alignment_scope(alignment):
            gate_up = self._product(layer, "w13", codes, scales, experts)
            codes, by_group = quantize_rows(gate_up, scale_format, silu_and_mul=True)
            down = self._product(layer, "w2", codes, by_group.t()[: len(codes)], experts)
        return sum_rows(down, places, weights)

    def _product(
        self,
        layer: RoutedExperts,
        stack: str,
        codes: torch.Tensor,
        scales: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply rows with the matrices of their experts; a row of expert -1 gets any bits."""
        weight, scale_inv = (getattr(layer, f"{stack}_weight{end}") for end in ("", "_scale_inv"))
        out = codes.new_empty(len(codes), weight.shape[1], dtype=torch.bfloat16)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (codes, scales), (weight, scale_inv), out, experts
        )
        return out

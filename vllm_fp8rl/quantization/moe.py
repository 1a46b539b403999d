"""MoE methods whose experts can be updated in a live engine.

vLLM's own methods repack or replace the expert stacks once after loading (``Fp8MoEMethod``,
``UnquantizedFusedMoEMethod``), so a later ``model.load_weights`` silently casts BF16 to FP8 under
old scales. The methods here allocate everything, and make their kernel, when the layer is built;
loads write in place (:mod:`vllm_fp8rl.storage.experts`), so captured graphs stay valid.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.gemm import GemmShape
from fp8rl.models.families import EXPERTS
from fp8rl.numerics import BLOCK, Quantized, cdiv
from vllm_fp8rl.engine.rank_state import RankState
from vllm_fp8rl.kernels.linear.choice import select_kernel
from vllm_fp8rl.quantization.linear import dummy_weights, live_data
from vllm_fp8rl.storage.experts import (
    ExpertGrids,
    ExpertLayout,
    ExpertParameter,
    PlainExperts,
    empty_stacks,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


class _ExpertsMethod(FusedMoEMethodBase):
    """What pinned and quantized experts have in common.

    Raises:
        UnsupportedError: experts of another form, e.g. with biases, or a communication pattern
            that needs them in another layout.
    """

    supports_pre_processed_weights = False
    grids: ExpertGrids | PlainExperts

    def __init__(self, layer: RoutedExperts, state: RankState, name: str) -> None:
        super().__init__(layer.moe_config)
        self.state = state
        self.name = name
        self._key = f"{name}.routed_experts"
        _check(self.moe, layer, name)
        state.layers[self._key] = layer  # compiled code finds it there

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters, and make the kernel over them."""
        to_local = layer._map_global_expert_id_to_local_expert_id
        numbers = {expert: to_local(expert) for expert in range(self.moe.num_experts)}
        width = self.moe.intermediate_size_per_partition_unpadded
        assert width is not None
        layout = ExpertLayout(
            name=self.state.hf_names.of(self.name),
            local={expert: number for expert, number in numbers.items() if number >= 0},
            total=self.moe.num_experts,
            hidden=hidden_size,
            intermediate=width,
            padded=intermediate_size_per_partition,
            tp_rank=self.moe.tp_rank,
            tp_size=self.moe.tp_size,
            names=self.state.spec.family.experts or EXPERTS,
        )
        self._register(layer, layout, params_dtype)

    def _register(self, layer: RoutedExperts, layout: ExpertLayout, dtype: torch.dtype) -> None:
        raise NotImplementedError

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig | None:
        """Return the configuration of vLLM's kernel; None on CPU, where no such kernel is used."""
        return self.moe_quant_config

    def discard(self, layer: RoutedExperts) -> None:
        """Put back what no refit brings, after a sleep has discarded the weights."""
        self.grids.layout.clear_padding(layer.w13_weight.data, layer.w2_weight.data)

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.moe_kernel is None:
            return _opaque_experts(x, topk_weights, topk_ids, self._key)
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )

    def product(self, layer: Any, stack: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Multiply ``x`` ``[rows, K]`` on a CPU with a local expert's part of ``w13`` or ``w2``."""
        return torch.nn.functional.linear(x, getattr(layer, f"{stack}_weight")[expert])

    def _incomplete(self) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint has no tensor '{self.grids.missing()[0]}'; load a complete "
            "checkpoint, or use load_format='dummy' and refit."
        )


class Fp8RLMoEMethod(_ExpertsMethod):
    """Block-FP8 experts, written in place by every load."""

    grids: ExpertGrids

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: Any,
    ) -> tuple[int, int]:
        """Round this rank's part of gate and of up to whole blocks."""
        hidden, width = super().maybe_roundup_sizes(
            hidden_size, intermediate_size_per_partition, act_dtype, moe_parallel_config
        )
        return hidden, cdiv(width, BLOCK[0]) * BLOCK[0]

    def _register(self, layer: RoutedExperts, layout: ExpertLayout, dtype: torch.dtype) -> None:
        stacks = empty_stacks(layout)
        device = stacks["w13_weight"].device
        self.grids = ExpertGrids(
            layout,
            partial(live_data, weakref.ref(layer)),
            self.state.recipe.weights.scale_format,
            device,
            self.state.guard.recheck,
        )
        for name, data in stacks.items():
            load = self.grids.load_scales if name.endswith("_scale_inv") else self.grids.load
            layer.register_parameter(name, ExpertParameter(data, self.grids, load))
        try:
            self._make_kernels(layer, device, dtype)
        except UnsupportedError as error:
            raise UnsupportedError(f"'{self.name}': {error}") from None

    def _make_kernels(self, layer: RoutedExperts, device: torch.device, dtype: torch.dtype) -> None:
        recipe, layout = self.state.recipe, self.grids.layout
        if device.type == "cuda":
            from vllm_fp8rl.kernels.moe import fused_moe

            self.moe_quant_config, self.moe_kernel = fused_moe.delegate_experts(
                layer, self.moe, recipe
            )
            if isinstance(self.moe_kernel.fused_experts, fused_moe.TritonOrDeepGemmExperts):
                fused_moe.warm_up_deep_gemm(layer, self.moe, self.state.warmup)
            return
        shapes = {
            "w13": GemmShape(0, 2 * layout.padded, layout.hidden),
            "w2": GemmShape(0, layout.hidden, layout.padded),
        }
        self._kernels = {
            (stack, expert): select_kernel(device, shape, recipe, dtype)
            for stack, shape in shapes.items()
            for expert in layout.local.values()
        }

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing to do for loaded weights, however often it is called.

        Raises:
            CheckpointError: the checkpoint left out a part of this layer.
        """
        self.state.built()
        # vLLM's dummy loader writes into the padding too.
        self.grids.layout.clear_padding(layer.w13_weight.data, layer.w2_weight.data)
        if self.grids.complete:
            return
        if not self.state.dummy:
            self.grids.require_paired()
            raise self._incomplete()
        self.grids.fill_missing(dummy_weights(layer.w13_weight.device))

    def discard(self, layer: RoutedExperts) -> None:
        super().discard(layer)
        self.grids.forget_unpaired()

    def require_ready(self, layer: RoutedExperts) -> None:
        """Raise RefitError while FP8 codes lack their scales."""
        self.grids.require_paired()

    def product(self, layer: Any, stack: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        codes, scale_inv = (getattr(layer, f"{stack}_weight{end}") for end in ("", "_scale_inv"))
        return self._kernels[stack, expert].apply(x, Quantized(codes[expert], scale_inv[expert]))


class RefitMoEMethod(_ExpertsMethod):
    """Experts in the model's dtype (pinned ones, or all with ``rollout: false``)."""

    grids: PlainExperts

    def _register(self, layer: RoutedExperts, layout: ExpertLayout, dtype: torch.dtype) -> None:
        self.grids = PlainExperts(layout, partial(live_data, weakref.ref(layer)))
        for name, shape in layout.stacks.items():
            data = torch.empty(shape, dtype=dtype)
            layer.register_parameter(name, ExpertParameter(data, self.grids, self.grids.load))
        if layer.w13_weight.device.type == "cuda":
            from vllm_fp8rl.kernels.moe.fused_moe import delegate_plain_experts

            self.moe_quant_config, self.moe_kernel = delegate_plain_experts(layer, self.moe)

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Nothing: upstream would repack or shuffle the stacks here, out of reach of a refit.

        Raises:
            CheckpointError: the checkpoint left out a part of this layer.
        """
        if self.grids.missing() and not self.state.dummy:
            raise self._incomplete()


@torch.library.custom_op(
    "fp8rl::experts",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor topk_ids, str name) -> Tensor",
)
def _opaque_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str
) -> torch.Tensor:
    """Return the experts of a layer on CPU, in float32 where vLLM's fused kernels are.

    One operation for torch.compile, which could not trace which tokens go where. The layer comes
    from vLLM's forward context by its name, as in vLLM's own MoE op.
    """
    layer = get_forward_context().no_compile_layers[name]
    product = layer.quant_method.product
    expert_map = layer.expert_map
    numbers = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in numbers.unique().tolist():
        if expert < 0:  # on another rank
            continue
        token, choice = torch.where(numbers == expert)
        gate, up = product(layer, "w13", expert, x[token]).float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(x.dtype)
        weight = topk_weights[token, choice, None].float()
        y.index_add_(0, token, product(layer, "w2", expert, hidden).float() * weight)
    return y.to(x.dtype)


@_opaque_experts.register_fake
def _(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, name: str
) -> torch.Tensor:
    return torch.empty_like(x)


def _check(moe: FusedMoEConfig, layer: RoutedExperts, name: str) -> None:
    reasons = {
        f"activation '{moe.activation.value}'": moe.activation != MoEActivation.SILU,
        "biases": moe.has_bias,
        "a clamped SwiGLU": getattr(layer, "swiglu_limit", None) is not None,
        "router weights on the input": layer.apply_router_weight_on_input,
        "LoRA": moe.is_lora_enabled,
        "an all2all backend with batched experts": (
            moe.moe_parallel_config.use_batched_activation_format
        ),
    }
    for reason, found in reasons.items():
        if found:
            raise UnsupportedError(
                f"'{name}' has {reason}, which vllm_fp8rl does not serve; start this model without "
                "quantization='fp8rl', or change that setting."
            )

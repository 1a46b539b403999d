"""A mixture of experts whose router and sum are the kernels of the rollout (``exact: true``).

Tokens go to the experts of this rank without Megatron's dispatcher, and an expert's result gets its
weight after ``linear_fc2``, as in the rollout, not before.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from fp8rl.errors import UnsupportedError
from fp8rl.kernels import REMEDY
from megatron_fp8rl.layers.linear import Fp8Module


class ExactRouter(TopKRouter, Fp8Module):
    """A router that hands out the chosen experts, of equal ones the first, and their weights.

    Python lets no object of an abstract class become one whose first base is another.
    """

    upstream_class = TopKRouter

    def forward(self, input: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Route ``[.., hidden]``.

        Returns:
            weights, float32 ``[tokens, top-k]``; experts, int64 ``[tokens, top-k]``.
        """
        return _Route.apply(input.flatten(0, -2), self.weight, self.topk)


class ExactMoELayer(Fp8Module, MoELayer):
    """``MoELayer`` with all experts on this rank, one after another or as grouped products."""

    upstream_class = MoELayer

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> tuple[Tensor, None]:
        """Compute the mixture of ``[.., hidden]``."""
        if intermediate_tensors is not None or padding_mask is not None:
            raise UnsupportedError(
                "exact computes a mixture of experts at once and for every token; leave out "
                f"padding_mask and CUDA graphs of its parts, {REMEDY}"
            )
        if self.moe_layer_recompute:
            return checkpoint(self._mixture, False, hidden_states), None
        return self._mixture(hidden_states), None

    def _mixture(self, hidden_states: Tensor) -> Tensor:
        weights, chosen = self.router(hidden_states)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)  # pairs of token and rank, expert after expert
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        places = places.view(chosen.shape)
        splits = torch.bincount(experts, minlength=self.num_local_experts).tolist()
        rows = _Dispatched.apply(hidden_states.flatten(0, -2), order, places)
        results = self._results(rows, splits)
        return _Combined.apply(results, weights, order, places).view(hidden_states.shape)

    def _results(self, rows: Tensor, splits: list[int]) -> Tensor:
        """Return each expert's results for its own run of rows."""
        experts = self.experts
        if isinstance(experts, SequentialMLP):
            parts = zip(experts.local_experts, rows.split(splits), strict=True)
            return torch.cat([expert(part)[0] for expert, part in parts])
        gate_up, _ = experts.linear_fc1(rows, splits)
        return experts.linear_fc2(_Swiglu.apply(gate_up), splits)[0]


def check_experts(layer: Any) -> None:
    """Refuse a MoELayer whose result would not be the rollout's."""
    config, router = layer.config, layer.router
    for module, kinds in (
        (layer, [MoELayer]),
        (router, [TopKRouter]),
        (layer.experts, [SequentialMLP, TEGroupedMLP]),
    ):
        if type(module) not in kinds:
            raise UnsupportedError(
                f"exact needs Megatron's {' or '.join(kind.__name__ for kind in kinds)} in a "
                f"mixture of experts, not {type(module).__name__}; build the model with "
                f"get_gpt_decoder_block_spec, {REMEDY}"
            )
    needed = [
        ("tensor_model_parallel_size", config.tensor_model_parallel_size, 1),
        ("expert_tensor_parallel_size", config.expert_tensor_parallel_size, 1),
        ("expert_model_parallel_size", config.expert_model_parallel_size, 1),
        ("moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size, None),
        ("moe_latent_size", getattr(config, "moe_latent_size", None), None),
        ("moe_router_score_function", config.moe_router_score_function, "softmax"),
        ("moe_router_pre_softmax", config.moe_router_pre_softmax, False),
        ("moe_router_group_topk", config.moe_router_group_topk, None),
        ("moe_router_topk_scaling_factor", config.moe_router_topk_scaling_factor, None),
        ("moe_router_enable_expert_bias", config.moe_router_enable_expert_bias, False),
        ("moe_router_force_load_balancing", config.moe_router_force_load_balancing, False),
        ("sinkhorn as load balancing", "sinkhorn" in config.moe_router_load_balancing_type, False),
        ("moe_z_loss_coeff", config.moe_z_loss_coeff, None),
        ("a loss for load balancing", router.is_aux_loss_enabled(), False),
        ("moe_input_jitter_eps", config.moe_input_jitter_eps, None),
        ("moe_expert_capacity_factor", config.moe_expert_capacity_factor, None),
        ("moe_apply_probs_on_input", config.moe_apply_probs_on_input, False),
        ("moe_enable_routing_replay", config.moe_enable_routing_replay, False),
    ]
    require_options(needed)


def require_options(needed: list[tuple[str, Any, Any]]) -> None:
    """Raise UnsupportedError for the first option whose value is another than the good one."""
    for what, value, good in needed:
        if value != good:
            raise UnsupportedError(
                f"exact needs {what} {good!r} in the trainer, not {value!r}; change it, {REMEDY}"
            )


class _Route(torch.autograd.Function):
    """Logits, choice and softmax; gradients reach the chosen logits alone, as upstream's do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
        from fp8rl.kernels.experts import choose_experts, router_logits  # needs Triton

        weights, chosen = choose_experts(router_logits(x, weight), count)
        chosen = chosen.long()
        ctx.save_for_backward(x, weight, weights, chosen)
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, weights, chosen = ctx.saved_tensors
        of_chosen = weights * (grads[0] - (grads[0] * weights).sum(-1, keepdim=True))
        grad = of_chosen.new_zeros(len(x), len(weight)).scatter_(1, chosen, of_chosen)
        return (grad @ weight.float()).to(x.dtype), (grad.t() @ x.float()).to(weight.dtype), None


class _Swiglu(torch.autograd.Function):
    """``silu(gate) * up`` in float32, rounded once."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        from fp8rl.numerics.triton.swiglu import silu_and_mul  # needs Triton

        ctx.save_for_backward(gate_up)
        return silu_and_mul(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            gate, up = gate_up.float().chunk(2, -1)
            y = torch.nn.functional.silu(gate) * up
        return torch.autograd.grad(y, gate_up, grads[0].float())[0]


class _Dispatched(torch.autograd.Function):
    """Rows of tokens in the order of their experts; gradients are added in the order of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x[order // places.shape[1]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from fp8rl.kernels.experts import sum_rows  # needs Triton

        return sum_rows(grads[0].contiguous(), *ctx.saved_tensors), None, None


class _Combined(torch.autograd.Function):
    """Weighted sums of the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        from fp8rl.kernels.experts import sum_rows  # needs Triton

        ctx.save_for_backward(rows, weights, order)
        return sum_rows(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, order = ctx.saved_tensors
        of_rows = grads[0][order // weights.shape[1]].float()
        grad_rows = (of_rows * weights.flatten()[order, None]).to(rows.dtype)
        grad_weights = torch.empty_like(weights)
        grad_weights.view(-1)[order] = (of_rows * rows.float()).sum(-1)
        return grad_rows, grad_weights, None, None

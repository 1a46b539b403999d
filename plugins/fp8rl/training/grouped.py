"""The experts of one rank as one grouped FP8 linear: each multiplies its own run of tokens.

The operands of a weight gradient have groups along tokens, which begin with each expert's first
token; quantization pads the ragged last group of each with zeros, so that token dispatchers need
not pad. All experts share one quantization of the activation, of the gradient and of the weights,
and one grouped product in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import Direction, GroupedBackend, GroupedShape
from fp8rl.numerics import (
    ExpertRows,
    GroupedColumns,
    GroupedRows,
    quantize_grouped,
    row_alignment,
    stream_of,
)
from fp8rl.training.linear import Fp8State, check_main_grad, hand_over, main_grad_of


def grouped_linear(
    x: torch.Tensor,
    splits: Sequence[int],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    state: Fp8State,
    *,
    fusion: bool,
) -> torch.Tensor:
    """Compute ``y_i = x_i @ weight_i.T + bias_i`` over runs of tokens; all products are FP8.

    Args:
        x: ``[tokens, in]``, the tokens of expert 0 first.
        splits: number of tokens of each expert, 0 allowed.
        weights: ``[out, in]`` each.
        biases: ``[out]`` each, or None.
        state: state of the module, with the names of its experts.
        fusion: whether gradients are added to ``weight.main_grad``.

    Returns:
        ``[tokens, out]`` in the dtype of ``x``.

    Raises:
        UnsupportedError: the splits do not add up.
    """
    if len(splits) != len(weights) or sum(splits) != len(x):
        raise UnsupportedError(
            f"'{state.name}' got {len(x)} tokens in {len(splits)} runs of {sum(splits)} for "
            f"{len(weights)} experts; give one run for each expert."
        )
    call = _GroupedCall(state, fusion, torch.is_grad_enabled(), tuple(splits))
    return _Fp8GroupedFunction.apply(x, call, *weights, *(biases or ()))


@dataclass(frozen=True)
class _GroupedCall:
    """The arguments of one forward that are not tensors with a gradient."""

    state: Fp8State
    fusion: bool
    training: bool
    """Autograd records this forward."""
    splits: tuple[int, ...]

    def quantize(
        self, x: torch.Tensor, expert_rows: ExpertRows, *, rowwise: bool = False, columnwise: bool
    ) -> tuple[GroupedRows | None, GroupedColumns | None]:
        return quantize_grouped(
            x, expert_rows, self.state.activation_format, rowwise=rowwise, columnwise=columnwise
        )

    def backend(
        self, direction: Direction, weight: torch.Tensor, dtype: torch.dtype
    ) -> GroupedBackend:
        shape = GroupedShape(self.splits, weight.shape[0], weight.shape[1], dtype)
        return self.state.backends.pick_grouped(weight.device, shape, self.state.name, direction)


class _Fp8GroupedFunction(torch.autograd.Function):
    """:func:`grouped_linear`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, call: _GroupedCall, *tensors: torch.Tensor
    ) -> torch.Tensor:
        experts = len(call.splits)
        weights, biases = tensors[:experts], tensors[experts:]
        ctx.call = call
        ctx.use_bias = bool(biases)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.main_grads = totals = [main_grad_of(weight, call.fusion) for weight in weights]
        if not x.numel():
            ctx.save_for_backward(*weights)
            return x.new_zeros(len(x), len(weights[0]))

        trained = [i for i, w in enumerate(weights) if call.training and w.requires_grad]
        # In the order of the gradients in memory, so that a kernel can add to all of them as one
        # stack: megatron's buffers hold the last parameter first.
        trained.sort(key=lambda i: 0 if (total := totals[i]) is None else total.data_ptr())
        ctx.expert_rows = expert_rows = call.state.last_rows.of(
            call.splits, row_alignment(x.device), trained, stream_of(x.device)
        )
        operand, for_wgrad = call.quantize(x, expert_rows, rowwise=True, columnwise=bool(trained))
        assert operand is not None
        kept = () if for_wgrad is None else for_wgrad[:2]
        ctx.save_for_backward(*weights, *kept)
        codes = call.state.codes
        backend = call.backend("fprop", weights[0], x.dtype)
        y = backend.grouped_fprop(operand, codes.rowwise(*weights, training=bool(trained)), x.dtype)
        _check_rows(y, call, backend)
        if not codes.layout.in_place:
            y = codes.layout.from_hf(y, -1)
        if biases:
            runs = zip(y.split(call.splits), biases, strict=True)
            y = torch.cat([run + bias for run, bias in runs])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _GroupedCall = ctx.call
        experts, grad = len(call.splits), grads[0]
        tensors = ctx.saved_tensors  # once: activation checkpointing refuses a second look
        weights, saved = tensors[:experts], tensors[experts:]
        need_x, _, *needed = ctx.needs_input_grad
        wanted = [expert for expert in range(experts) if needed[expert]]
        for expert in wanted:
            name = call.state.experts[expert]
            check_main_grad(name, call.fusion, ctx.main_grads[expert])
        grad_biases: list[torch.Tensor | None] = []
        if ctx.use_bias:
            grad_biases = [run.sum(0) for run in grad.split(call.splits)]
        if not grad.numel():
            grad_x = grad.new_zeros(ctx.x_shape, dtype=ctx.x_dtype) if need_x else None
            zeros = {
                expert: torch.zeros_like(weights[expert])
                for expert in wanted
                if ctx.main_grads[expert] is None
            }
            return grad_x, None, *_hand_over(ctx.main_grads, weights, wanted, zeros), *grad_biases

        codes, expert_rows = call.state.codes, ctx.expert_rows
        in_place = codes.layout.in_place
        operand, grad_t = call.quantize(
            grad, expert_rows, rowwise=need_x and in_place, columnwise=bool(wanted)
        )
        grad_x = None
        if need_x:
            if operand is None:
                reordered = codes.layout.to_hf(grad, -1)
                operand, _ = call.quantize(reordered, expert_rows, rowwise=True, columnwise=False)
            assert operand is not None
            backend = call.backend("dgrad", weights[0], ctx.x_dtype)
            grad_x = backend.grouped_dgrad(operand, codes.columnwise(*weights), ctx.x_dtype)
            _check_rows(grad_x, call, backend)
        products: dict[int, torch.Tensor] = {}
        if wanted:
            assert grad_t is not None
            codes_t, scale_inv_t = saved
            x_t = GroupedColumns(codes_t, scale_inv_t, expert_rows)
            products = _weight_grads(call, grad_t, x_t, ctx.x_dtype, weights, ctx.main_grads)
        handed = _hand_over(ctx.main_grads, weights, wanted, products)
        return grad_x, None, *handed, *grad_biases


def _check_rows(product: torch.Tensor, call: _GroupedCall, backend: GroupedBackend) -> None:
    """Raise UnsupportedError for a product with other rows than one for each token."""
    if len(product) != sum(call.splits):
        raise UnsupportedError(
            f"GEMM backend '{backend.name}' returned {len(product)} rows for the "
            f"{sum(call.splits)} tokens of '{call.state.name}'; let it end with "
            "fp8rl.numerics.place_boundaries."
        )


def _weight_grads(
    call: _GroupedCall,
    grad_t: GroupedColumns,
    x_t: GroupedColumns,
    dtype: torch.dtype,
    weights: Sequence[torch.Tensor],
    main_grads: Sequence[torch.Tensor | None],
) -> dict[int, torch.Tensor]:
    """Return the gradients of the experts without a ``main_grad``; add those of the others."""
    order = x_t.expert_rows.order
    totals = [main_grads[expert] for expert in order]
    dtypes = {None if total is None else total.dtype for total in totals}
    # One kernel adds to gradients of one dtype; where only some experts have any, none is added to.
    out = [t for t in totals if t is not None] if len(dtypes) == 1 and None not in dtypes else None
    direction: Direction = "wgrad_add" if out and out[0].dtype == torch.float32 else "wgrad"
    backend = call.backend(direction, weights[0], dtype)
    if out is not None:
        backend.grouped_wgrad(grad_t, x_t, out[0].dtype, out)
        return {}
    made = backend.grouped_wgrad(
        grad_t, x_t, weights[0].dtype if dtypes == {None} else torch.float32
    )
    products = {}
    for expert, product, total in zip(order, made, totals, strict=True):
        if total is None:
            products[expert] = product.to(weights[expert].dtype)
        else:
            total.add_(product)
    return products


def _hand_over(
    main_grads: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor],
    wanted: Sequence[int],
    products: dict[int, torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return what autograd gets for each weight."""
    handed: list[torch.Tensor | None] = [None] * len(weights)
    placeholder = None
    for expert in wanted:
        weight, main_grad = weights[expert], main_grads[expert]
        if main_grad is None:
            handed[expert] = products[expert]
            continue
        if placeholder is None and hasattr(weight, "grad_added_to_main_grad"):
            placeholder = torch.empty_like(weight)
        handed[expert] = hand_over(weight, main_grad, placeholder)
    return handed

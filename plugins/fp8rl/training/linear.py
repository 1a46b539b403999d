"""A linear layer over FP8 operands as one autograd function; no engine's module.

Operands (DeepSeek-V3 technical report, section 3.3): activations in 1x128 groups along the input,
gradients in 1x128 groups along the output, weights in 128x128 blocks, both operands of the weight
gradient in 1x128 groups along tokens, a ragged last group padded with zeros. An infinity among
them becomes NaN, so an overflow shows in the loss and in the gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import BackendChoice, Direction, GemmBackend, GemmShape
from fp8rl.kernels import implementation
from fp8rl.numerics import (
    LastExpertRows,
    Operand,
    Quantized,
    quantize_operand,
    quantize_swiglu,
    quantize_swiglu_grad,
)
from fp8rl.recipe import ScaleFormat
from fp8rl.training.weight_codes import WeightCodes


@dataclass(frozen=True)
class Fp8State:
    """State of a converted module beside its parameters."""

    name: str
    """Global HF module name, e.g. ``model.layers.3.self_attn.qkv_proj``."""
    codes: WeightCodes
    backends: BackendChoice
    activation_format: ScaleFormat
    experts: tuple[str, ...] = ()
    """Names of all local experts of a grouped module, in the order of the weights; ``name`` leaves
    their numbers out."""
    last_rows: LastExpertRows = field(default_factory=LastExpertRows)
    """Shared by the grouped modules of a conversion."""


class Link:
    """Carry the gradient of gate and up, as codes, from the second linear of a gated MLP to the
    first in one backward. Autograd passes a placeholder of NaN in its place."""

    def __init__(self) -> None:
        self._operand: Operand | None = None
        self._placeholder: torch.Tensor | None = None

    def put(self, operand: Operand, like: torch.Tensor) -> torch.Tensor:
        """Leave the codes here; return the placeholder, in the shape and dtype of ``like``."""
        self._operand = operand
        self._placeholder = like.new_full((), float("nan")).expand(like.shape)
        return self._placeholder

    def take(self, grad: torch.Tensor, name: str) -> Operand | None:
        """Return the codes that ``grad`` stands for, or None if it is a gradient itself.

        Raises:
            UnsupportedError: something has been added to the placeholder.
        """
        operand, placeholder = self._operand, self._placeholder
        self._operand = self._placeholder = None
        if operand is None or placeholder is None:
            return None
        if grad.data_ptr() != placeholder.data_ptr():
            raise UnsupportedError(
                f"The output of '{name}' is used by more than the activation that follows it, so "
                "its gradient is not the one that was quantized; switch "
                "config.bias_activation_fusion off."
            )
        return operand


@dataclass(slots=True)  # not frozen: one is made in every forward, and that is slower
class Call:
    """The arguments of one forward that are not tensors with a gradient."""

    state: Fp8State
    fusion: bool
    """Gradients must be added to ``weight.main_grad``."""
    training: bool
    """The weight may need a gradient."""
    allreduce_dgrad: bool = False
    sequence_parallel: bool = False
    tp_group: Any = None
    link: Link | None = None
    """The link to the other linear of the same gated MLP."""
    swiglu: bool = False
    """The input is ``[gate, up]``; what is multiplied is ``silu(gate) * up``."""
    norm: tuple[torch.Tensor, float] | None = None
    """Weight and epsilon of an RMS norm of the input, computed by the kernel that quantizes it; no
    backward follows."""

    def quantize(
        self, x: torch.Tensor, *, rowwise: bool = False, columnwise: bool = False
    ) -> Operand:
        return quantize_operand(
            x, self.state.activation_format, rowwise=rowwise, columnwise=columnwise
        )

    def backend(
        self, direction: Direction, weight: torch.Tensor, tokens: int, dtype: torch.dtype
    ) -> GemmBackend:
        """Choose the backend of a product over activations of ``dtype``."""
        shape = GemmShape(tokens, self.state.codes.layout.rows, weight.shape[1], dtype)
        return self.state.backends.pick(weight.device, shape, self.state.name, direction)


class Fp8LinearFunction(torch.autograd.Function):
    """Compute ``y = x @ weight.T + bias``; the products of forward and backward are FP8.

    Its arguments are ``x`` ``[tokens.., in]``, under sequence parallelism this rank's share of the
    first dimension; ``bias`` ``[out]`` or None; a :class:`Call`; and the weights ``[.., in]``,
    whose rows together are those of the call's layout. It returns ``[tokens.., out]`` in the dtype
    of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, call: Call, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        ctx.use_bias = bias is not None
        ctx.main_grad = main_grad_of(weights[0], call.fusion)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        if not x.numel():
            ctx.save_for_backward(*weights)
            return x.new_zeros(*x.shape[:-1], call.state.codes.layout.rows)

        # The operand of wgrad comes out of the same read, and takes half the memory of x. Under
        # sequence parallel it has groups over tokens of other ranks.
        fused = call.training and not call.sequence_parallel
        rows, form = x.flatten(0, -2), call.state.activation_format
        operand: Quantized | None
        if call.norm is not None:
            operand, for_wgrad = normalized_operand(rows, *call.norm, form), None
        else:
            quantize = quantize_swiglu if call.swiglu else quantize_operand
            operand, for_wgrad = quantize(rows, form, rowwise=True, columnwise=fused)
        assert operand is not None
        kept: tuple[torch.Tensor, ...] = (x,) if for_wgrad is None else for_wgrad
        if call.swiglu and for_wgrad is not None:
            kept = (*for_wgrad, x)  # the gradient of SwiGLU takes gate and up
        ctx.save_for_backward(*weights, *kept)
        shape = list(x.shape)
        if call.sequence_parallel:
            # Groups lie within a token, so the codes can be gathered: half the bytes.
            operand = _gather_codes(operand, call.tp_group)
            shape[0] *= call.tp_group.size()
        backend = call.backend("fprop", weights[0], operand.codes.shape[0], x.dtype)
        y = backend.fprop(
            operand, call.state.codes.rowwise(*weights, training=call.training), x.dtype
        )
        if not call.state.codes.layout.in_place:
            y = call.state.codes.layout.from_hf(y, -1)
        y = y.view(*shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        need_x, _, _, *needed = ctx.needs_input_grad
        tensors = ctx.saved_tensors  # once: activation checkpointing refuses a second look
        weights, saved = tensors[: len(needed)], tensors[len(needed) :]
        grad = grads[0].flatten(0, -2)
        need_weight = any(needed)
        if not grad.numel():
            nothing = grad.new_zeros(ctx.x_shape, dtype=ctx.x_dtype) if need_x else None
            none = [
                _no_grad_weight(call, weight, ctx.main_grad) if need else None
                for weight, need in zip(weights, needed, strict=True)
            ]
            return nothing, grad.sum(0) if ctx.use_bias else None, None, *none
        gathered = _done
        if need_weight and len(saved) == 1:
            x = saved[0]
            if call.sequence_parallel:
                x, gathered = _gather_tokens(x, call.tp_group)

        in_place = call.state.codes.layout.in_place
        quantized = None
        if call.link is not None and not call.swiglu:
            quantized = call.link.take(grads[0], call.state.name)
        if quantized is None:
            quantized = call.quantize(grad, rowwise=need_x and in_place, columnwise=need_weight)
        operand, grad_t = quantized
        grad_x, reduced = None, _done
        if need_x:
            if operand is None:
                reordered = call.state.codes.layout.to_hf(grad, -1)
                operand, _ = call.quantize(reordered, rowwise=True)
            assert operand is not None
            shape = ctx.x_shape
            if call.swiglu:
                shape = torch.Size((*shape[:-1], shape[-1] // 2))
            grad_x, reduced = _grad_input(call, operand, weights, shape, ctx.x_dtype)
            if call.swiglu:
                assert call.link is not None
                h = saved[-1]
                grad_h = quantize_swiglu_grad(
                    grad_x.flatten(0, -2), h.flatten(0, -2), call.state.activation_format
                )
                grad_x = call.link.put(grad_h, h)
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        if need_weight:
            gathered()
            x_t: Quantized | None = (
                call.quantize(x.flatten(0, -2), columnwise=True).columnwise
                if len(saved) == 1
                else Quantized(*saved[:2])
            )
            assert grad_t is not None and x_t is not None
            made = _grad_weight(
                call, grad_t, x_t, len(grad), ctx.x_dtype, weights[0], ctx.main_grad
            )
            grad_weights = [made]
            if len(weights) > 1:
                assert made is not None  # fusion is of a single weight
                parts = zip(made.split([len(w) for w in weights]), needed, strict=True)
                grad_weights = [part if need else None for part, need in parts]
        grad_bias = grad.sum(0) if ctx.use_bias else None
        reduced()
        return grad_x, grad_bias, None, *grad_weights


def _grad_input(
    call: Call,
    grad: Quantized,
    weights: Sequence[torch.Tensor],
    shape: torch.Size,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Return the gradient of x in ``shape``, and a function that waits for its reduction."""
    backend = call.backend("dgrad", weights[0], grad.codes.shape[0], dtype)
    full = backend.dgrad(grad, call.state.codes.columnwise(*weights), dtype)
    if call.sequence_parallel:
        share = full.new_empty(shape)
        full = full.view(shape[0] * call.tp_group.size(), *shape[1:])
        work = torch.distributed.reduce_scatter_tensor(
            share, full, group=call.tp_group, async_op=True
        )
        return share, work.wait
    full = full.view(shape)
    if call.allreduce_dgrad:
        return full, torch.distributed.all_reduce(full, group=call.tp_group, async_op=True).wait
    return full, _done


def _grad_weight(
    call: Call,
    grad_t: Quantized,
    x_t: Quantized,
    tokens: int,
    dtype: torch.dtype,
    weight: torch.Tensor,
    main_grad: torch.Tensor | None,
) -> torch.Tensor | None:
    """Compute the gradient of the weights from operands with groups along ``tokens``.

    With a ``main_grad`` it is added to that, and what autograd needs is returned.
    """
    check_main_grad(call.state.name, call.fusion, main_grad)
    if main_grad is None:
        return call.backend("wgrad", weight, tokens, dtype).wgrad(grad_t, x_t, weight.dtype)
    direction: Direction = "wgrad_add" if main_grad.dtype == torch.float32 else "wgrad"
    call.backend(direction, weight, tokens, dtype).wgrad(grad_t, x_t, main_grad.dtype, main_grad)
    return hand_over(weight, main_grad)


def _no_grad_weight(
    call: Call, weight: torch.Tensor, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what autograd needs for a weight that multiplied no token."""
    check_main_grad(call.state.name, call.fusion, main_grad)
    return torch.zeros_like(weight) if main_grad is None else hand_over(weight, main_grad)


def main_grad_of(weight: torch.Tensor, fusion: bool) -> torch.Tensor | None:
    """Return the tensor that the gradient is added to, or None to return the gradient.

    It is looked up in forward, as megatron does: a module used twice (MTP) must not see a swapped
    buffer. A buffer made by DDP is used even without ``gradient_accumulation_fusion``, which
    megatron ties to apex's kernel: adding here is faster, and sums in float32.
    """
    if fusion or hasattr(weight, "grad_added_to_main_grad"):
        return getattr(weight, "main_grad", None)
    return None


def check_main_grad(name: str, fusion: bool, main_grad: torch.Tensor | None) -> None:
    """Raise UnsupportedError for gradient accumulation fusion without a ``main_grad``."""
    if fusion and main_grad is None:
        raise UnsupportedError(
            f"'{name}' has gradient_accumulation_fusion on, but its weight has no "
            "main_grad; wrap the model in megatron's DistributedDataParallel first."
        )


def hand_over(
    weight: torch.Tensor, main_grad: torch.Tensor, placeholder: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return what autograd gets for a weight whose gradient has been added to ``main_grad``.

    A parameter of DDP still needs a gradient, of any content, to run the hook that starts its
    reduction (tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication). One
    ``placeholder`` of its shape may serve many weights, because DDP's hook frees it at once.
    """
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros_like(weight)
    # Detached, because autograd would copy a tensor that somebody else holds too.
    return torch.empty_like(weight) if placeholder is None else placeholder.detach()


def _gather_codes(operand: Quantized, group: Any) -> Quantized:
    ranks = group.size()
    # Collectives know no E4M3 (gloo) or treat it as numbers; a gather only moves bytes.
    raw = operand.codes.view(torch.uint8)
    codes = raw.new_empty(ranks * raw.shape[0], raw.shape[1])
    scale_inv = operand.scale_inv.new_empty(
        ranks * operand.scale_inv.shape[0], operand.scale_inv.shape[1]
    )
    gather = torch.distributed.all_gather_into_tensor
    gather(codes, raw, group=group)
    gather(scale_inv, operand.scale_inv.contiguous(), group=group)
    return Quantized(codes.view(operand.codes.dtype), scale_inv)


def _gather_tokens(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Return the whole sequence, and a function that waits until it is filled."""
    full = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    gather = torch.distributed.all_gather_into_tensor
    return full, gather(full, x.contiguous(), group=group, async_op=True).wait


def _done() -> None:
    """Nothing to wait for."""


def normalized_operand(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, scale_format: ScaleFormat
) -> Quantized:
    """Quantize the RMS norm of ``x`` ``[rows, hidden]``, in one kernel, with the bits of two.

    Returns:
        Rowwise side of :func:`fp8rl.numerics.quantize_operand`.
    """
    kernels = implementation(x, "norm")
    codes, scales, _ = kernels.rms_norm_quantize(x, None, weight, epsilon, scale_format)
    return Quantized(codes, scales.t()[: len(x)])

"""FP8 modules in the place of ``torch.nn.Linear`` and of transformers' experts.

A module changes its class and nothing else: parameters, their names and dtypes, hooks and state
dicts stay. FSDP2 gathers the parameters of a decoder layer before its forward, so the weights that
the rollout fuses are there together, and blocks can lie over all of their rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import Quantized
from fp8rl.training.grouped import grouped_linear
from fp8rl.training.linear import Call, Fp8LinearFunction, Fp8State, Link
from fp8rl.training.weight_codes import WeightCodes


class TorchCodes(WeightCodes):
    """Codes of weights also under FSDP2, by which a weight is freed and gathered between uses."""

    def address(self, weight: torch.Tensor) -> int:
        """Return the address of the weight's storage object, empty or filled.

        FSDP2 keeps the object and gives it other memory.
        """
        return weight.untyped_storage()._cdata


class Fp8Torch(nn.Module):
    """A module of a converted model.

    Its codes are dropped when it is moved, gets a state dict or changes between training and
    evaluation.
    """

    def fp8_states(self) -> Sequence[Fp8State]:
        """States of the matrices that the module is a part of, or holds."""
        raise NotImplementedError

    def codes_by_name(self) -> dict[str, Quantized]:
        """Quantize the weights as they are now; see :meth:`Conversion.weight_codes`."""
        raise NotImplementedError

    def drop_codes(self) -> None:
        """Free the kept codes."""
        for state in self.fp8_states():
            state.codes.drop()

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.drop_codes()
        return super().train(mode)

    def _apply(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        self.drop_codes()
        return super()._apply(fn, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.drop_codes()
        super()._load_from_state_dict(*args, **kwargs)


class Fp8Linear(Fp8Torch, nn.Linear):
    """``torch.nn.Linear`` over FP8 operands; made by ``convert``, never built directly."""

    fp8_matrix: Matrix
    fp8_part: int
    """Number of the module in its matrix."""

    @torch.compiler.disable  # what lies between FP8 modules is compiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = self.fp8_matrix.product(self.fp8_part, input)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fp8_states(self) -> Sequence[Fp8State]:
        return (self.fp8_matrix.state,)

    def codes_by_name(self) -> dict[str, Quantized]:
        return self.fp8_matrix.codes_by_name()


class Matrix:
    """Weights of one matrix of the rollout, in one linear or several, and their one product.

    A model calls q, k and v, or gate and up, one after the other with one input. The first call
    multiplies for all of them, so that the input is quantized once and blocks and groups lie where
    the rollout and Megatron have them; the others take their share. A call with anything else in
    between, another input or new weights, multiplies again.
    """

    def __init__(self, state: Fp8State, modules: dict[str, nn.Linear]) -> None:
        self.state = state
        self._modules = modules
        self._shares: _Shares | None = None

    def product(self, part: int, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T`` of a module, ``[.., rows of the module]``."""
        weights = self._weights()
        if len(weights) == 1:
            return self._multiply(x, weights)
        version = 0 if x.is_inference() else x._version
        key = (self.state.codes.key(weights), version, torch.is_grad_enabled())
        shares = self._shares
        if shares is None or shares.of() is not x or shares.key != key or part not in shares.left:
            y = self._multiply(x, weights)
            parts = torch.unsafe_split_with_sizes(y, [len(weight) for weight in weights], -1)
            shares = self._shares = _Shares(self, x, key, dict(enumerate(parts)))
        share = shares.left.pop(part)
        if not shares.left:
            self._shares = None
        return share

    def in_gated_mlp(self, x: torch.Tensor, link: Link, *, swiglu: bool) -> torch.Tensor:
        """Return the product of all modules, ``[.., rows]``, for :class:`Fp8GatedMLP`.

        Args:
            x: ``[.., in]``, or gate and up side by side where ``swiglu`` is set.
            link: between the two matrices of the MLP.
            swiglu: multiply ``silu(gate) * up``.
        """
        return self._multiply(x, self._weights(), link, swiglu=swiglu)

    def _weights(self) -> list[torch.Tensor]:
        return [whole(m.weight, f"{name}.weight") for name, m in self._modules.items()]

    def codes_by_name(self) -> dict[str, Quantized]:
        """Quantize the weights as they are now."""
        weights = [gathered(module.weight) for module in self._modules.values()]
        codes = self.state.codes
        return codes.layout.by_name(self.state.name, codes.fresh(*weights))

    def forget(self, shares: _Shares) -> None:
        """Free shares, whoever has not taken one."""
        if self._shares is shares:
            self._shares = None

    def _multiply(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        link: Link | None = None,
        *,
        swiglu: bool = False,
    ) -> torch.Tensor:
        training = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        call = Call(self.state, fusion=False, training=training, link=link, swiglu=swiglu)
        return Fp8LinearFunction.apply(autocast(x), None, call, *weights)


class _Shares:
    """Products of one input for the modules of a matrix, until each has taken its own."""

    def __init__(
        self, matrix: Matrix, x: torch.Tensor, key: Any, left: dict[int, torch.Tensor]
    ) -> None:
        owner, me = weakref.ref(matrix), weakref.ref(self)

        def input_is_gone(_: Any) -> None:
            found, shares = owner(), me()
            if found is not None and shares is not None:
                found.forget(shares)

        self.of = weakref.ref(x, input_is_gone)
        self.key = key
        self.left = left


class Fp8GatedMLP(nn.Module):
    """A gated MLP with SwiGLU and quantization in one kernel, forward and backward.

    ``convert`` derives a class of this one and of the module's own. SwiGLU is computed in float32
    and rounded once, as in the rollout. A forward is transformers' own if it is not BF16, hooks or
    adapters are on the linears, or anomaly detection is on.
    """

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linears: list[Any] = [self.gate_proj, self.up_proj, self.down_proj]
        if autocast(x).dtype != torch.bfloat16 or not all(map(_is_alone, linears)):
            return super().forward(x)
        link, (gate, _, down) = Link(), linears
        gate_up = gate.fp8_matrix.in_gated_mlp(x, link, swiglu=False)
        y = down.fp8_matrix.in_gated_mlp(gate_up, link, swiglu=True)
        return y if down.bias is None else y + down.bias.to(y.dtype)


def _is_alone(linear: Any) -> bool:
    """Tell whether a linear has nothing around it that would see what the kernel keeps: the
    activation, or its gradient."""
    watched = linear._forward_hooks or linear._forward_pre_hooks
    watched = watched or linear._backward_hooks or linear._backward_pre_hooks
    anomaly = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    return type(linear) is Fp8Linear and not (watched or anomaly or _has_any_global_hook())


class Fp8Experts(Fp8Torch):
    """Experts of transformers 5 over FP8 operands.

    ``convert`` derives a class of this one and of the module's own.
    """

    fp8_grouped: tuple[Fp8State, Fp8State]
    """States of gate and up, and of down."""
    fp8_parameters: tuple[str, str]

    @torch.compiler.disable
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute the mixture, in the order of transformers' ``grouped_mm_experts_forward``.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, k]``, the experts of each token.
            top_k_weights: ``[tokens, k]``, their weights.

        Returns:
            ``[tokens, hidden]`` in the dtype of ``hidden_states``.
        """
        state = self.fp8_grouped[0]
        if getattr(self, "_is_expert_parallel", False):
            raise UnsupportedError(
                f"'{state.name}' is split over ranks by a plan of transformers, which FP8 training "
                "does not serve; load the model without tp_plan."
            )
        count, choices = len(state.experts), top_k_index.shape[-1]
        experts = top_k_index.flatten()
        order = experts.argsort(stable=True)  # pairs of token and choice, expert after expert
        splits = torch.bincount(experts, minlength=count).tolist()
        rows = autocast(hidden_states)[order // choices]
        gate_up = self._multiply(0, rows, splits)
        y = self._multiply(1, self._apply_gate(gate_up), splits)  # type: ignore[operator]
        y = y * top_k_weights.flatten()[order, None]
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        y = y[places].view(*top_k_index.shape, y.shape[-1]).sum(dim=1)
        return y.to(hidden_states.dtype)

    def _multiply(self, which: int, rows: torch.Tensor, splits: Sequence[int]) -> torch.Tensor:
        state, name = self.fp8_grouped[which], self.fp8_parameters[which]
        weights = whole(getattr(self, name), state.name).unbind()
        return grouped_linear(rows, splits, weights, None, state, fusion=False)

    def fp8_states(self) -> Sequence[Fp8State]:
        return self.fp8_grouped

    def codes_by_name(self) -> dict[str, Quantized]:
        found: dict[str, Quantized] = {}
        for state, parameter in zip(self.fp8_grouped, self.fp8_parameters, strict=True):
            layout = state.codes.layout
            for name, weight in zip(state.experts, gathered(getattr(self, parameter)), strict=True):
                found |= layout.by_name(name, state.codes.fresh(weight))
        return found


def whole(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a parameter in its forward, if it is not in pieces."""
    if isinstance(tensor, DTensor):
        raise UnsupportedError(
            f"'{name}' is a DTensor while its layer runs: give whole decoder layers to "
            "fully_shard, not single linears, and shard weights by no tensor-parallel plan."
        )
    return tensor


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter as a whole, outside of a forward; a collective under FSDP2."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):  # offloaded, it is where the mesh's collectives do not work
        tensor = tensor.to(tensor.device_mesh.device_type)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast an activation to the dtype of an open autocast region."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

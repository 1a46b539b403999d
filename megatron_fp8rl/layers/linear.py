"""FP8 linear layers: megatron's Column/RowParallelLinear with another matrix product.

Only ``_forward_impl`` is overridden; megatron still does tensor and sequence parallelism, bias and
checkpoints. Parameters stay in the model's dtype, and their FP32 masters are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from fp8rl.errors import UnsupportedError
from fp8rl.gemm import GemmBackend, GemmShape, GroupedBackend, GroupedShape
from fp8rl.kernels import REMEDY
from fp8rl.numerics import BLOCK, GROUP
from fp8rl.training.layout import REPLICATED
from fp8rl.training.linear import Call, Fp8LinearFunction, Fp8State, Link
from fp8rl.training.weight_codes import WeightCodes
from megatron_fp8rl import compat
from megatron_fp8rl.layers.linear_modules import Site


class Fp8Module:
    """A module of a converted model; ``isinstance`` with this class is the one way to tell.

    ``convert`` changes the class of a built module from ``upstream_class`` to a subclass of this
    one, and nothing else: parameters, names, hooks and checkpoints stay.
    """

    upstream_class: ClassVar[type | None] = None
    """Class that the module had before; None for a module that was built as ours."""
    fp8_setup: Any = None
    """:class:`megatron_fp8rl.conversion.Setup` of the model; None after :meth:`give_back`."""

    @staticmethod
    def check_options(path: str, module: Any) -> None:
        """Refuse an upstream module whose options this class does not serve."""

    def give_back(self) -> None:
        """Leave the conversion: drop its state and take the upstream class back."""
        for attribute in ("fp8_state", "fp8_setup"):
            vars(self).pop(attribute, None)
        if self.upstream_class is not None:
            self.__class__ = self.upstream_class  # type: ignore[assignment]


class Fp8Linear(Fp8Module):
    """A linear layer over FP8 operands, with one weight or with one for each local expert.

    Its codes are dropped when the module is moved or changes between training and evaluation.
    Frameworks offload and swap weights at those moments, some of them through ``.data``, which
    leaves no trace on the parameter.
    """

    in_gated_mlp: ClassVar[Literal["first", "second"] | None] = None
    """Which linear of a gated MLP exactly this class may be where the activation is fused: the
    first one hands out gate and up, the second one takes them
    (:class:`megatron_fp8rl.layers.swiglu.Fp8SwigluMLP`)."""
    fp8_state: Fp8State
    fp8_link: Link | None = None
    """Set by :class:`megatron_fp8rl.layers.swiglu.Fp8SwigluMLP` during one forward."""

    @property
    def takes_gate_and_up(self) -> bool:
        """Whether the input of this forward is gate and up, side by side."""
        return self.fp8_link is not None and self.in_gated_mlp == "second"

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:  # type: ignore[attr-defined]
            self.drop_codes()
        return super().train(mode)  # type: ignore[misc]

    def _apply(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        self.drop_codes()
        return super()._apply(fn, *args, **kwargs)  # type: ignore[misc]

    def drop_codes(self) -> None:
        """Free the codes; the next forward makes them anew."""
        self.fp8_state.codes.drop()


class _LocalFp8Linear(Fp8Linear):
    weight: torch.nn.Parameter

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        gradient_accumulation_fusion: bool = False,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        name = self.fp8_state.name
        compat.check_neutral(name, options)
        if weight is not self.weight:
            raise UnsupportedError(
                f"'{name}' was called with a weight that is not its own; pin it to BF16."
            )
        check_weight(name, weight)
        call = Call(
            state=self.fp8_state,
            fusion=gradient_accumulation_fusion,
            allreduce_dgrad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            training=torch.is_grad_enabled() and weight.requires_grad,
            link=self.fp8_link,
            swiglu=self.takes_gate_and_up,
        )
        return fp8_linear(input, weight, bias, call)


class Fp8ColumnParallelLinear(_LocalFp8Linear, ColumnParallelLinear):
    """``ColumnParallelLinear`` over FP8 operands; made by ``convert``, never built directly."""

    upstream_class = ColumnParallelLinear
    in_gated_mlp = "first"


class Fp8RowParallelLinear(_LocalFp8Linear, RowParallelLinear):
    """``RowParallelLinear`` over FP8 operands; made by ``convert``, never built directly."""

    upstream_class = RowParallelLinear
    in_gated_mlp = "second"


FP8_CLASSES: dict[type, type[Fp8Linear]] = {
    cls.upstream_class: cls for cls in (Fp8ColumnParallelLinear, Fp8RowParallelLinear)
}
"""Upstream class -> FP8 class."""


Change = tuple[Any, type[Fp8Module], dict[str, Any]]
"""A module, its new class, attributes to set."""


def change_of(site: Site, classes: Mapping[type, type[Fp8Linear]], setup: Any) -> Change:
    """Choose class, GEMM backend and state of a linear module; change nothing."""
    kind = type(site.module)
    ours = classes.get(kind)
    if ours is None:
        raise UnsupportedError(
            f"'{site.path}' is a {kind.__name__}; FP8 linears replace ColumnParallelLinear, "
            "RowParallelLinear and TransformerEngine's linear classes alone (pin the module to "
            "BF16, or build the model from another layer spec)."
        )
    ours.check_options(site.path, site.module)
    for weight in site.weights:
        expected = site.layout.rows + site.other_rows
        if len(weight) != expected:
            raise UnsupportedError(
                f"'{site.path}' has {len(weight)} rows where its config says {expected}; pin it "
                "to BF16."
            )
        check_weight(site.path, weight)
    for part, rows in site.sharded.items():
        if part in REPLICATED and rows % BLOCK[0]:
            raise UnsupportedError(
                f"'{site.path}' has {rows} rows of '{part}' on this rank, no multiple of "
                f"{BLOCK[0]}, and a rank of the rollout has all of them, so their codes would "
                "differ; pin kind a_proj to BF16, or use TransformerEngine's spec."
            )
    if site.weights[0].device.type != "meta":  # else memory, and a device, come later
        _check_backend(site, setup)
    recipe = setup.recipe
    codes = WeightCodes(site.layout, recipe.weights.scale_format, setup.epoch, stacked=site.grouped)
    state = Fp8State(
        site.name,
        codes,
        setup.backends,
        recipe.activations.scale_format,
        experts=site.names if site.grouped else (),
        last_rows=setup.last_rows,
    )
    return site.module, ours, {"fp8_state": state}


def _check_backend(site: Site, setup: Any) -> None:
    """Refuse a module that no GEMM backend multiplies, or with ``exact`` not the rollout's."""
    first = site.weights[0]
    out_features, in_features = len(first) - site.other_rows, first.shape[1]
    backend: GemmBackend | GroupedBackend
    if site.grouped:
        sizes = (GROUP,) * len(site.weights)
        experts = GroupedShape(sizes, out_features, in_features, first.dtype)
        backend = setup.backends.pick_grouped(first.device, experts, site.name)
    else:
        shape = GemmShape(GROUP, out_features, in_features, first.dtype)
        backend = setup.backends.pick(first.device, shape, site.name)
    needed = "reference" if first.is_cpu else "deep_gemm"
    if setup.recipe.exact and backend.name != needed:
        raise UnsupportedError(
            f"exact needs the GEMM backend '{needed}' for '{site.name}' {list(first.shape)} in the "
            f"trainer, and '{backend.name}' would multiply it; install DeepGEMM on a GPU (a vLLM "
            "wheel carries it), name no other backend, choose a model with multiples of 64 "
            f"features on each rank (128 in experts), {REMEDY}"
        )


def check_weight(name: str, weight: torch.nn.Parameter) -> None:
    """Refuse a weight that Megatron-FSDP has sharded."""
    if hasattr(weight, "__fsdp_param__"):
        raise UnsupportedError(
            f"'{name}' is sharded by Megatron-FSDP, which FP8 linears do not serve; use DDP "
            "with the distributed optimizer."
        )


def fp8_linear(
    x: torch.Tensor, weight: torch.nn.Parameter, bias: torch.Tensor | None, call: Call
) -> torch.Tensor:
    """Compute ``y = x @ weight.T + bias``; the products of forward and backward are FP8.

    Args:
        x: ``[tokens.., in]``, under sequence parallelism this rank's share of the first dimension;
            an expert may have no tokens at all.
        weight: ``[out, in]``. Rows behind those of the layout stay in the model's dtype.

    Returns:
        ``[tokens.., out]`` in the dtype of ``x``.
    """
    rows = call.state.codes.layout.rows
    if rows == len(weight):
        return Fp8LinearFunction.apply(x, bias, call, weight)
    biases = (None, None) if bias is None else (bias[:rows], bias[rows:])
    # Autograd joins the gradients of the two parts, so none of them is added to main_grad here.
    y = Fp8LinearFunction.apply(x, biases[0], replace(call, fusion=False), weight[:rows])
    if call.sequence_parallel:
        x = gather_from_sequence_parallel_region(x, group=call.tp_group)
    elif call.allreduce_dgrad:
        x = copy_to_tensor_model_parallel_region(x, group=call.tp_group)
    rest = torch.nn.functional.linear(x, weight[rows:], biases[1])
    return torch.cat([y, rest], dim=-1)

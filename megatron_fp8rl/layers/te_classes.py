"""TransformerEngine's linear classes over FP8 operands of this package; needs TransformerEngine.

Written for megatron-core 0.16.1 (extensions/transformer_engine.py) and TransformerEngine 2.12 to
2.20 (pytorch/module/{linear,layernorm_linear,grouped_linear}.py). A module changes its class and
nothing else: parameters, ``_extra_state``, hooks and names stay, so checkpoints of either class
load into the other, and a pinned module keeps TransformerEngine's own forward.

What TransformerEngine does around its product is done here: the norm of a LayerNormLinear, the
collective of a row-parallel layer, and a bias that is handed out instead of added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TERowParallelGroupedLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from fp8rl.errors import UnsupportedError
from fp8rl.training.grouped import grouped_linear
from fp8rl.training.linear import Call
from megatron_fp8rl.layers.linear import Fp8Linear, check_weight, fp8_linear
from megatron_fp8rl.layers.linear_modules import weights_of
from megatron_fp8rl.layers.norms import normalize

# Attributes of TransformerEngine's modules that request something FP8 linears do not do.
_REFUSED = {
    "ub_overlap_ag_fprop": "user-buffer overlap holds BF16 operands, FP8 linears gather codes",
    "ub_overlap_rs_fprop": "user-buffer overlap is not served",
    "ub_overlap_ag_dgrad": "user-buffer overlap is not served",
    "ub_overlap_rs_dgrad": "user-buffer overlap is not served",
    "ub_bulk_dgrad": "user-buffer overlap is not served",
    "ub_bulk_wgrad": "user-buffer overlap is not served",
    "return_layernorm_output": "the norm's output stays inside",
    "primary_weights_in_fp8": "its weights are stored in FP8, without the BF16 values",
    "fsdp_group": "FSDP is not served",
    "symmetric_ar_type": "symmetric-memory all-reduce is not served",
    "single_grouped_weight": "experts have a weight each here",
    "single_grouped_bias": "experts have a bias each here",
}


def _check_options(path: str, module: Any) -> None:
    """See :meth:`Fp8Module.check_options`."""
    for attribute, reason in _REFUSED.items():
        value = getattr(module, attribute, None)
        if value:
            raise UnsupportedError(
                f"'{path}' has {attribute}={value!r}: {reason}; switch it off or pin the module "
                "to BF16."
            )
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        raise UnsupportedError(
            f"'{path}' delays its weight gradients, FP8 linears compute them at once; switch "
            "delay_wgrad_compute off."
        )
    if getattr(module, "te_quant_params", None) is not None:
        raise UnsupportedError(
            f"'{path}' has a precision of its own from megatron's quant_recipe; leave the module "
            "out of it, or pin it to BF16 here."
        )


class _Fp8TELinear(Fp8Linear):
    """Forward of the classes with one weight."""

    check_options = staticmethod(_check_options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.multiply(x)

    def multiply(
        self, x: torch.Tensor, norm: tuple[torch.Tensor, float] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Multiply rows ``[.., K]``, normalized first by ``norm``, a weight and its epsilon."""
        module: Any = self
        state, weight = module.fp8_state, module.weight
        check_weight(state.name, weight)
        bias = module.bias if module.use_bias else None
        added = bias if module.apply_bias else None
        parallel = module.parallel_mode if module.tp_size > 1 else None
        column, row = parallel == "column", parallel == "row"
        call = Call(
            state=state,
            fusion=module.fuse_wgrad_accumulation,
            training=torch.is_grad_enabled() and weight.requires_grad,
            sequence_parallel=column and module.sequence_parallel,
            allreduce_dgrad=column and not module.sequence_parallel,
            tp_group=module.tp_group if parallel else None,
            link=module.fp8_link,
            swiglu=module.takes_gate_and_up,
            norm=norm,
        )
        y = fp8_linear(x, weight, None if row else added, call)
        if row:  # the bias comes after the sum over ranks
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if module.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            y = reduce(y, group=module.tp_group)
            y = y if added is None else y + added
        return y, bias if module.te_return_bias else None


class Fp8TEColumnParallelLinear(_Fp8TELinear, TEColumnParallelLinear):
    """``TEColumnParallelLinear`` over FP8 operands; made by ``convert``."""

    upstream_class = TEColumnParallelLinear
    in_gated_mlp = "first"


class Fp8TERowParallelLinear(_Fp8TELinear, TERowParallelLinear):
    """``TERowParallelLinear`` over FP8 operands; made by ``convert``."""

    upstream_class = TERowParallelLinear
    in_gated_mlp = "second"


class Fp8TELinear(_Fp8TELinear, TELinear):
    """``TELinear``, whole on each rank as in multi-latent attention; made by ``convert``."""

    upstream_class = TELinear


class Fp8TELayerNormColumnParallelLinear(_Fp8TELinear, TELayerNormColumnParallelLinear):
    """``TELayerNormColumnParallelLinear`` over FP8 operands; made by ``convert``."""

    upstream_class = TELayerNormColumnParallelLinear
    in_gated_mlp = "first"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.return_layernorm_output:  # Megatron-Bridge sets it where it adds an adapter later
            raise UnsupportedError(
                f"'{self.fp8_state.name}' has return_layernorm_output on: FP8 training does not "
                "serve LoRA; set training to false in the recipe, or train without adapters."
            )
        exact = self.fp8_setup.recipe.exact
        if exact and not torch.is_grad_enabled():  # a backward would need the normalized rows
            return self.multiply(x, (self.layer_norm_weight, self.eps))
        return super().forward(normalize(self, x, exact=exact))


class _Fp8TEGroupedLinear(Fp8Linear):
    """Forward of the classes with a weight for each expert."""

    check_options = staticmethod(_check_options)

    def forward(
        self, x: torch.Tensor, m_splits: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        module: Any = self
        biases = None
        if module.use_bias:
            biases = [getattr(module, f"bias{i}") for i in range(module.num_gemms)]
        weights = weights_of(module)
        for expert, weight in zip(self.fp8_state.experts, weights, strict=True):
            check_weight(expert, weight)
        # The token dispatcher communicates between experts.
        y = grouped_linear(
            x,
            [int(tokens) for tokens in m_splits],
            weights,
            biases if module.apply_bias else None,
            self.fp8_state,
            fusion=module.fuse_wgrad_accumulation,
        )
        return y, biases if module.te_return_bias else None


class Fp8TEColumnParallelGroupedLinear(_Fp8TEGroupedLinear, TEColumnParallelGroupedLinear):
    """``TEColumnParallelGroupedLinear`` over FP8 operands; made by ``convert``."""

    upstream_class = TEColumnParallelGroupedLinear


class Fp8TERowParallelGroupedLinear(_Fp8TEGroupedLinear, TERowParallelGroupedLinear):
    """``TERowParallelGroupedLinear`` over FP8 operands; made by ``convert``."""

    upstream_class = TERowParallelGroupedLinear


TE_CLASSES: dict[type, type[Fp8Linear]] = {
    cls.upstream_class: cls
    for cls in (
        Fp8TEColumnParallelLinear,
        Fp8TERowParallelLinear,
        Fp8TELinear,
        Fp8TELayerNormColumnParallelLinear,
        Fp8TEColumnParallelGroupedLinear,
        Fp8TERowParallelGroupedLinear,
    )
}

"""Everything that depends on the version of megatron-core, imported when it is used."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from fp8rl.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

SUPPORTED_VERSIONS = ("0.16.1", "0.20.0")
"""A release, and the commit that Megatron-Bridge and NeMo RL pin (Megatron-LM 2a75ac1)."""

BRIDGE_TYPES = {
    "column": (
        "Fp8ColumnParallelLinear",
        "Fp8TEColumnParallelLinear",
        "Fp8TELayerNormColumnParallelLinear",
        "Fp8TEColumnParallelGroupedLinear",
    ),
    "row": (
        "Fp8RowParallelLinear",
        "Fp8TERowParallelLinear",
        "Fp8TERowParallelGroupedLinear",
    ),
}
"""Parallelism of the FP8 classes, in Megatron-Bridge's terms."""

_FORWARD_IMPL_ARGUMENTS = {
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "tp_group",
    "grad_output_buffer",
    "wgrad_deferral_limit",
}
# Arguments of newer versions, with the value that requests nothing.
_NEUTRAL = {"async_grad_allreduce": None, "gtp_remat_size": 1, "output_dtype": None}


def installed_version() -> str | None:
    """Return the version of megatron-core on this machine, or None."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def check_forward_impl() -> None:
    """Check that the methods this package overrides are the known ones.

    ``ColumnParallelLinear._forward_impl`` and ``RowParallelLinear._forward_impl``
    (tensor_parallel/layers.py) must exist, and ``forward`` must call them with known arguments.

    Raises:
        UnsupportedError: this megatron-core is built differently.
    """
    from megatron.core.tensor_parallel import layers

    known = set(
        inspect.signature(layers.linear_with_grad_accumulation_and_async_allreduce).parameters
    )
    missing = sorted(_FORWARD_IMPL_ARGUMENTS - known)
    for cls in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        if "_forward_impl" not in vars(cls):
            missing.append(f"{cls.__name__}._forward_impl")
    if missing:
        raise UnsupportedError(
            f"megatron-core {installed_version()} has no {', '.join(missing)}, which the FP8 "
            f"linears replace; use megatron-core {' or '.join(SUPPORTED_VERSIONS)}."
        )


def has_transformer_engine() -> bool:
    """Tell whether megatron-core found TransformerEngine, so that its TE classes exist."""
    from megatron.core.extensions import transformer_engine

    return bool(transformer_engine.HAVE_TE)


def mtp_transformer_layer(module: Any) -> Any:
    """Return the transformer layer of a MultiTokenPredictionLayer; it was renamed after 0.16."""
    found = getattr(module, "transformer_layer", None)
    return found if found is not None else module.mtp_model_layer


def megatron_lm_save_folder() -> str | None:
    """Return ``--save`` of a running Megatron-LM, or None outside of one."""
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    return getattr(args, "save", None)


def register_with_bridge() -> None:
    """Register the FP8 classes with Megatron-Bridge, and allow its saved configs to name this
    package.

    ``AutoMapping`` (models/conversion/param_mapping.py) knows linear classes by name.

    Raises:
        UnsupportedError: Megatron-Bridge is not installed, or has no such registry.
    """
    try:
        from megatron.bridge.models.conversion.param_mapping import AutoMapping
    except ImportError as error:
        raise UnsupportedError(
            f"Megatron-Bridge cannot be imported ({error}); install it, or use "
            "megatron_fp8rl.convert and megatron_fp8rl.export."
        ) from None
    for kind, names in BRIDGE_TYPES.items():
        for name in names:
            AutoMapping.register_module_type(name, kind)
    try:
        from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
    except ImportError:  # versions without an allow-list take any name
        return
    register_allowed_target_prefix("megatron_fp8rl")


def check_neutral(name: str, options: dict[str, Any]) -> None:
    """Refuse arguments of a newer ``_forward_impl`` that request something unknown.

    Raises:
        UnsupportedError: naming the argument and the module.
    """
    for key, value in options.items():
        if value != _NEUTRAL.get(key):
            raise UnsupportedError(
                f"'{name}' was called with {key}={value!r}, which FP8 linears do not serve; pin "
                "the module to BF16 or switch the option off."
            )


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: Any, *, wait: bool = True) -> Any:
    """All-gather along dimension 0; return the work handle unless ``wait``."""
    from megatron.core.tensor_parallel.layers import dist_all_gather_func

    return dist_all_gather_func(output, shard, group=group, async_op=not wait)


def reduce_scatter(output: torch.Tensor, full: torch.Tensor, group: Any) -> Any:
    """Start a sum reduce-scatter along dimension 0; return the work handle."""
    from megatron.core.tensor_parallel.layers import dist_reduce_scatter_func

    return dist_reduce_scatter_func(output, full, group=group, async_op=True)

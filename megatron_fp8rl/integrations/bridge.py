"""Megatron-Bridge: a pre-wrap hook that converts, and export through Bridge's own conversion.

::

    provider.register_pre_wrap_hook(pre_wrap_hook())
    ...
    for name, tensor in export_hf_weights(auto_bridge, model, precision="fp8"):

Bridge is imported when one of these is used, never before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import ScaleFormat
from megatron_fp8rl import compat
from megatron_fp8rl.conversion import Conversion, Report, conversion_of, convert, fp8_classes
from megatron_fp8rl.export import ModelChunks, fp8_wire
from megatron_fp8rl.integrations.megatron_lm import say
from megatron_fp8rl.layers.exact import ExactColumnParallelLinear

Chunks = list[torch.nn.Module]


def register() -> None:
    """Make the FP8 classes known to Bridge; the functions here call it themselves."""
    compat.register_with_bridge([*fp8_classes().values(), ExactColumnParallelLinear])


def pre_wrap_hook(
    recipe: Recipe | None = None,
    *,
    report: Report = say,
    converted: Callable[[Conversion], None] | None = None,
) -> Callable[[Chunks], Chunks]:
    """Make a hook for ``provider.register_pre_wrap_hook`` that converts the model.

    Args:
        recipe: what runs in FP8; by default ``FP8RL_RECIPE``, or else the default recipe.
        report: function that takes the table of pins.
        converted: function that takes the handle, also on a rank without an FP8 module.

    Returns:
        ``hook(model) -> model``; the handle is also ``conversion_of(model)``. It raises as
        :func:`megatron_fp8rl.convert`.
    """

    def hook(model: Chunks) -> Chunks:
        register()
        conversion = convert(model, recipe or Recipe.from_env() or Recipe(), report=report)
        if converted is not None:
            converted(conversion)
        return model

    return hook


def export_hf_weights(
    bridge: Any,
    model: ModelChunks,
    *,
    precision: Literal["bf16", "fp8"] = "bf16",
    scale_format: ScaleFormat | None = None,
    tensor_parallel_size: int = 1,
    **options: Any,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream Hugging Face tensors from Bridge, with FP8 codes for FP8 modules on request.

    Args:
        bridge: an ``AutoBridge``.
        model: converted chunks as Bridge takes them.
        precision: ``bf16`` for the tensors as they are (a receiver that quantizes them gets the
            trainer's codes), ``fp8`` for codes and scales as :func:`fp8_wire` gives them.
        scale_format: scale format of the codes; the recipe's by default.
        tensor_parallel_size: tensor-parallel size of the rollout engine, for ``fp8``.
        **options: options of ``bridge.export_hf_weights``.

    Returns:
        Pairs of HF name and tensor.

    Raises:
        UnsupportedError: the model was not converted.
        PinError: while streaming, for a matrix that the pins do not know.
    """
    if precision not in ("bf16", "fp8"):
        raise UnsupportedError(f"precision '{precision}' is not served; use 'bf16' or 'fp8'.")
    register()
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    stream = ((name, tensor) for name, tensor in bridge.export_hf_weights(chunks, **options))
    if precision == "bf16":
        return stream
    conversion = conversion_of(model)
    return fp8_wire(
        stream,
        conversion.policy,
        scale_format or conversion.recipe.weights.scale_format,
        tensor_parallel_size=tensor_parallel_size,
    )

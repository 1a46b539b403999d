"""What megatron's local layers lack where TransformerEngine is not installed, on any device.

For the demo and the tests alone; on GPUs that train, TransformerEngine is there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_fp8rl.compat import query_norm_patch

Patch = tuple[Any, str, Any]
"""Owner, attribute, and its value while the patch is in place."""

_MISSING = object()


@contextmanager
def completed_local_spec() -> Iterator[None]:
    """A region in which norms accept sequence parallelism, and routers run without
    TransformerEngine; leaving it restores everything."""
    with ExitStack() as stack:
        apply(stack, local_spec_patches())
        yield


def local_spec_patches() -> list[Patch]:
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention, multi_token_prediction
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    patches: list[Patch] = [(WrappedTorchNorm, "__new__", _any_norm(WrappedTorchNorm.__new__))]
    if not hasattr(moe_utils, "te_general_gemm"):
        # Without TransformerEngine the router reads a name that its module never defines.
        patches.append((moe_utils, "te_general_gemm", None))
    query_norm = query_norm_patch()
    if query_norm is not None:
        patches.append(query_norm)
    if not transformer_engine.HAVE_TE:
        # It takes TransformerEngine for installed, and then asks isinstance() of a mock.
        patches.append((multi_latent_attention, "HAVE_TE", False))
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        # It compares with classes that are None without TransformerEngine (0.20).
        name = "is_inference_column_parallel_linear"
        patches.append((multi_token_prediction, name, lambda module: False))
    return patches


def apply(stack: ExitStack, patches: Iterable[Patch]) -> None:
    """Put the patches in place until ``stack`` closes."""
    for owner, name, value in patches:
        # vars() keeps a staticmethod a staticmethod; a class may also only inherit the name.
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if old is _MISSING:
            stack.callback(delattr, owner, name)
        else:
            stack.callback(setattr, owner, name, old)


def _any_norm(build: Callable[..., torch.nn.Module]) -> Callable:
    """torch's norms refuse sequence parallel, though all they lack is the tag on their parameters.

    ``finalize_model_grads`` sums the gradients of tagged parameters over the TP group.
    """

    def __new__(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        local = copy.copy(config)
        local.sequence_parallel = False
        norm: Any = build(cls, local, *args, **kwargs)
        for parameter in norm.parameters() if config.sequence_parallel else ():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return __new__

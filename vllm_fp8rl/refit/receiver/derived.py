"""What vLLM makes of weights once they are loaded: made again by a refit, or refused by name.

vLLM lets a quantization method, an attention layer and its backend take something out of the
loaded weights: a packed matrix, a float32 copy. The inventory does not know such a tensor, so a
refit would be complete and the layer go on with the old one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention, MMEncoderAttention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from fp8rl.errors import UnsupportedError
from vllm_fp8rl.engine.names import NAME
from vllm_fp8rl.engine.rank_state import RankState

_STEP = "process_weights_after_loading"
_METHODS = (QuantizeMethodBase, UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods of vLLM whose step takes nothing: on a GPU it is empty, on a CPU it is replaced
(:mod:`vllm_fp8rl.patches.packing`)."""
_ATTENTION = (Attention, MLAAttention, MMEncoderAttention)
"""Layers whose step is about KV scales, which fp8rl sets, about parts of ``kv_b_proj``, which
:mod:`vllm_fp8rl.quantization.mla` derives again, or about scales of a tower in FP8."""
_NO_STEP = "vllm.v1.attention.backend"
"""Module of the attention backends' base class, whose step is empty."""
_ROUTER_SPLIT = "allow_rocm_bf16x3_router_gemm"
"""Attribute of vLLM's ``GateLinear``: whether its step splits the weight, which only ROCm does."""


def require_nothing_derived(model: torch.nn.Module) -> None:
    """Refuse a model that keeps what it has taken out of its weights where no refit writes.

    Raises:
        UnsupportedError: names module and class.
    """
    for path, module in model.named_modules():
        keeper = _keeper(module, is_model=not path)
        if keeper is not None:
            raise UnsupportedError(
                f"'{path or type(model).__name__}' ({type(module).__name__}) keeps what "
                f"{type(keeper).__name__} makes of its weight once it is loaded, so a refit would "
                f"leave the old weight in use; start this model without quantization='{NAME}', or "
                "add it (docs/extending.md)."
            )


def _keeper(module: Any, *, is_model: bool) -> Any:
    """Return what keeps something that a refit does not reach; None where nothing does."""
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        ours = isinstance(getattr(method, "state", None), RankState)
        no_split = not getattr(module, _ROUTER_SPLIT, True)
        if not (ours or no_split or _is_step_of(method, _METHODS)):
            return method
        if not ours and isinstance(module, LinearBase) and _may_be_packed(module):
            return method
    if not hasattr(module, _STEP):
        return None
    if not _is_step_of(module, _ATTENTION):
        return module if is_model or hasattr(module, "get_attn_backend") else None
    impl = getattr(module, "impl", None)
    steps = [] if impl is None else getattr(impl, "get_impl_variants", lambda: (impl,))()
    return next(filter(_converts_sinks, steps), None)


def _is_step_of(found: Any, kinds: tuple[type, ...]) -> bool:
    """Tell whether the step of an object is the one of a class here, and not a subclass's own."""
    step = getattr(type(found), _STEP, None)
    return any(step is getattr(kind, _STEP, None) for kind in kinds)


def _may_be_packed(linear: Any) -> bool:
    """Tell whether vLLM may pack this convolution on a CPU, which its loader does not repeat."""
    weight = linear.weight
    if not weight.is_cpu or weight.ndim != 3:
        return False
    return not getattr(weight.weight_loader, "packs_again", False)


def _converts_sinks(impl: Any) -> bool:
    """Tell whether an attention backend copies its input; FlashInfer does so with sinks alone."""
    step = getattr(impl, _STEP, None)
    if step is None or step.__module__ == _NO_STEP:
        return False
    return type(impl).__module__.rpartition(".")[2] != "flashinfer" or impl.sinks is not None

"""The trainer's attention over K and V as the rollout's FP8 or INT8 cache holds them.

The rollout attends over keys and values of 8 bits, the trainer over BF16 ones: the largest part of
the mismatch of two engines in FP8. A pre-hook on ``core_attention`` quantizes and dequantizes K and
V: for E4M3 by the scales that the engines had when they sampled the batch, for INT8 by those of
each token and head, which the engines make in the same way. It sees them after QK norm and rotary
embedding, as the cache does; recomputation calls it again, and under context parallelism K and V
are exchanged after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import KVDtype
from fp8rl.training.kv import LayerCache, RoundedKV, check_dtype
from megatron_fp8rl.config_checks import check_no_cuda_graphs
from megatron_fp8rl.export import ModelChunks, device_of, unwrap_chunks
from megatron_fp8rl.kv.observers import core_attentions
from megatron_fp8rl.layers.exact import ExactCore


class KVCacheInTraining(RoundedKV):
    """Quantize and dequantize K and V of every decoder layer.

    Scales of E4M3 are set from outside: until :meth:`set` is called, and after :meth:`clear`,
    attention is as upstream's. An INT8 cache needs none, and is in service from the start.
    Gradients pass straight through, also those of clipped values. Observers of the same model
    (:class:`~megatron_fp8rl.kv.observers.QKVObserver`) go on seeing the values before quantization.

    Args:
        model_chunks: this rank's GPTModel or virtual-pipeline chunks, plain or wrapped.
        dtype: of the rollouts' KV cache.

    Raises:
        UnsupportedError: ``dtype`` is ``auto`` or no dtype of a KV cache; multi-latent attention,
            whose cache holds latents, a layer without ``core_attention``, a model in CUDA graphs,
            or one that has a ``KVCacheInTraining`` already, or whose conversion with ``exact`` has
            a cache of another dtype.
    """

    def __init__(self, model_chunks: ModelChunks, dtype: KVDtype = "fp8_e4m3") -> None:
        check_dtype(dtype)
        chunks = unwrap_chunks(model_chunks)
        check_no_cuda_graphs(
            chunks[0].config,
            "a replayed graph would quantize K and V, or not, as when it was captured",
            "set kv_cache.in_training to false",
        )
        attentions = dict(core_attentions(chunks))
        _check_not_quantized(attentions)
        _check_dtype_of_exact(attentions, dtype)
        super().__init__(tuple(attentions), device_of(chunks), dtype)
        for layer, of_layer in self.of_layers().items():
            module = attentions[layer]
            if isinstance(module, ExactCore):  # its kernel reads what the cache would hold
                module.exact_cache = of_layer
                self._handles.append(_Service(module))
            else:
                hook = _QuantizeKV(of_layer, layer)
                self._handles.append(module.register_forward_pre_hook(hook))


@dataclass(frozen=True, eq=False)
class _Service:
    """Takes a layer of an exact model out of service."""

    module: ExactCore

    def remove(self) -> None:
        vars(self.module).pop("exact_cache", None)  # gone already after Conversion.close()


@dataclass(frozen=True, eq=False)
class _QuantizeKV:
    """The pre-hook on the ``core_attention`` of one layer."""

    of_layer: LayerCache
    layer: int

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.of_layer.in_service:
            return None
        if len(args) < 3:
            raise UnsupportedError(
                f"core_attention of layer {self.layer} was called with {len(args)} positional "
                "arguments, so its k and v cannot be quantized; set kv_cache.in_training to false."
            )
        query, key, value, *others = args
        self.of_layer.count(key, value)
        return (query, *self.of_layer.rounded(key, value), *others)


def _check_not_quantized(attentions: Mapping[int, torch.nn.Module]) -> None:
    """Refuse a second quantization: it would make codes of values that are rounded already."""
    for layer, module in attentions.items():
        hooks = module._forward_pre_hooks.values()
        if any(isinstance(hook, _QuantizeKV) for hook in hooks) or (
            isinstance(module, ExactCore) and module.exact_cache is not None
        ):
            raise UnsupportedError(
                f"core_attention of layer {layer} already belongs to a KVCacheInTraining, and two "
                "would quantize K and V twice; use that one, or call its close() first."
            )


def _check_dtype_of_exact(attentions: Mapping[int, torch.nn.Module], dtype: KVDtype) -> None:
    """Refuse a cache that is not the rollout's."""
    for module in attentions.values():
        if isinstance(module, ExactCore) and module.fp8_setup.recipe.kv_cache.dtype != dtype:
            of_recipe = module.fp8_setup.recipe.kv_cache.dtype
            raise UnsupportedError(
                f"The model was converted with exact and kv_cache.dtype '{of_recipe}', so its "
                f"attention over a cache of '{dtype}' would not be the rollout's; make "
                f"KVCacheInTraining(model, '{of_recipe}')."
            )

"""The trainer's attention over K and V as the rollout's FP8 or INT8 cache holds them.

The rollout attends over keys and values of 8 bits, the trainer over BF16 ones: the largest part of
the mismatch of two engines in FP8. A pre-hook on ``core_attention`` quantizes and dequantizes K and
V: for E4M3 by the scales that the engines had when they sampled the batch, for INT8 by those of
each token and head, which the engines make in the same way. It sees them after QK norm and rotary
embedding, as the cache does; recomputation calls it again, and under context parallelism K and V
are exchanged after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import check_scale, parse_scale_name, require_one_name, scale_name
from fp8rl.numerics import fake_quantize_int8_kv, fake_quantize_kv
from fp8rl.recipe import KVDtype
from megatron_fp8rl.config_checks import check_no_cuda_graphs
from megatron_fp8rl.export import ModelChunks, device_of, unwrap_chunks
from megatron_fp8rl.kv.observers import core_attentions
from megatron_fp8rl.layers.exact import ExactCore


class KVCacheInTraining:
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
        if dtype == "auto":
            raise UnsupportedError(
                "A KV cache of dtype 'auto' holds K and V as they are; make no KVCacheInTraining, "
                "or set kv_cache.dtype to fp8_e4m3 or int8_per_token_head."
            )
        if dtype not in get_args(KVDtype):
            raise UnsupportedError(
                f"There is no KV cache of dtype {dtype!r}; use 'fp8_e4m3' or 'int8_per_token_head'."
            )
        chunks = unwrap_chunks(model_chunks)
        check_no_cuda_graphs(
            chunks[0].config,
            "a replayed graph would quantize K and V, or not, as when it was captured",
            "set kv_cache.in_training to false",
        )
        attentions = dict(core_attentions(chunks))
        _check_not_quantized(attentions)
        _check_dtype_of_exact(attentions, dtype)
        device = device_of(chunks)
        self.has_scales = dtype == "fp8_e4m3"
        """Whether :meth:`set` must be called with the scales of each refit."""
        self.in_service = not self.has_scales
        """Whether forwards quantize K and V."""
        self._layers = tuple(attentions)
        self._scales = torch.ones(len(attentions), 2, device=device)
        self._clipped = torch.zeros(len(attentions), 2, dtype=torch.int64, device=device)
        self._seen = [0, 0]
        self._handles: list[Any] = []
        cells = zip(attentions.items(), self._scales, self._clipped, strict=True)
        for (layer, module), scales, clipped in cells:
            of_layer = LayerCache(self, scales if self.has_scales else None, clipped)
            if isinstance(module, ExactCore):  # its kernel reads what the cache would hold
                module.exact_cache = of_layer
                self._handles.append(_Service(module))
            else:
                hook = _QuantizeKV(of_layer, layer)
                self._handles.append(module.register_forward_pre_hook(hook))

    def set(self, scales: Mapping[str, Tensor | float]) -> None:
        """Use these scales from now on; call it when a refit with them has ended.

        They must stay until the last backward pass over rollouts of that refit is done:
        recomputed activations would differ from the first ones.

        Args:
            scales: name on the wire -> scale, as ``QKVObserver.scales`` returns and a refit sends
                them, in either form of :func:`fp8rl.kv_scales.parse_scale_name`; those of q and of
                layers on other ranks are left out.

        Raises:
            ScaleError: a scale is missing, came twice, or is 0, negative or not finite, or the
                cache is in INT8; nothing has changed then.
        """
        if not self.has_scales:
            raise ScaleError(
                "An INT8 KV cache makes its own scales, so KVCacheInTraining.set has no use for "
                "any; do not call it."
            )
        if not isinstance(scales, Mapping):
            raise ScaleError(
                f"KV scales came as a {type(scales).__name__}; give a mapping from name to scale."
            )
        given = _by_canonical_name(scales)
        table = []
        for layer in self._layers:
            names = [scale_name(layer, "k"), scale_name(layer, "v")]
            missing = [name for name in names if name not in given]
            if missing:
                raise ScaleError(
                    f"'{missing[0]}' is missing, so the trainer cannot attend over the K and V of "
                    "the rollouts; give all scales of the refit, or set kv_cache.in_training to "
                    "false."
                )
            table.append([check_scale(name, given[name]) for name in names])
        self._scales.copy_(torch.tensor(table, dtype=torch.float32).view_as(self._scales))
        self.in_service = True

    def clear(self) -> None:
        """Leave K and V as they are: over E4M3 until scales are set again, over INT8 for good."""
        self.in_service = False

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Leave K and V as they are inside the block, e.g. for observers of others."""
        before, self.in_service = self.in_service, False
        try:
            yield
        finally:
            self.in_service = before

    def metrics(self, group: torch.distributed.ProcessGroup | None = None) -> dict[str, float]:
        """Return what was clipped since the last call; a collective that every rank must join.

        Args:
            group: process group with the ranks of this model; the world by default.

        Returns:
            ``k_clipped_share`` and ``v_clipped_share``: values beyond 448 times their scale, as a
            share of all that forwards of all layers and ranks have seen; recomputed ones count
            twice. Empty where nothing was quantized to E4M3; INT8 clips nothing.
        """
        if not self.has_scales:
            return {}
        seen = torch.tensor(self._seen, dtype=torch.int64, device=self._clipped.device)
        counts = torch.stack((self._clipped.sum(0), seen))
        self._clipped.zero_()
        self._seen = [0, 0]
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(counts, group=group)
        clipped, total = counts.tolist()
        if not all(total):
            return {}
        return {"k_clipped_share": clipped[0] / total[0], "v_clipped_share": clipped[1] / total[1]}

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _count(self, key: Tensor, value: Tensor) -> None:
        self._seen[0] += key.numel()
        self._seen[1] += value.numel()


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What the attention of one layer needs to see K and V as the cache holds them."""

    cache: KVCacheInTraining
    scales: Tensor | None
    """float32 ``[2]``, of K and of V; None for INT8."""
    clipped: Tensor
    """int64 ``[2]``, counts of values beyond the range of E4M3."""

    @property
    def in_service(self) -> bool:
        """Whether forwards quantize K and V."""
        return self.cache.in_service

    def count(self, key: Tensor, value: Tensor) -> None:
        """Count values that are quantized, for the share of clipped ones."""
        if self.scales is not None:
            self.cache._count(key, value)

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V as the cache holds them, with the gradient of the identity."""
        if self.scales is None:
            return _RoundedToInt8.apply(key, value)
        return _RoundedToE4M3.apply(key, value, self.scales, self.clipped)


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


def _by_canonical_name(scales: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return the scales by the names of ``scale_name``; entries with other names are left out."""
    places = [(name, parse_scale_name(str(name))) for name in scales]
    names = require_one_name((name, place) for name, place in places if place is not None)
    return {scale_name(*place): scales[name] for place, name in names.items()}


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


class _RoundedToE4M3(torch.autograd.Function):
    """``fake_quantize_kv`` with the gradient of the identity (Bengio et al., 2013)."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, scales: Tensor, clipped: Tensor
    ) -> tuple[Tensor, Tensor]:
        return fake_quantize_kv(key, value, scales, clipped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*grads, None, None)


class _RoundedToInt8(torch.autograd.Function):
    """``fake_quantize_int8_kv`` with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return fake_quantize_int8_kv(key, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads

"""KV scales from forwards that run anyway, and attention over K and V as the rollout's cache holds
them, in models of transformers.

Attention modules of transformers call a function from a registry with q, k and v, after QK norm and
rotary embedding, as the cache sees them. The entry of the model's implementation is wrapped there;
the wrapper does something for the attention modules of an observed model alone, which change their
class for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import KVDtype
from fp8rl.training.kv import AmaxTable, LayerCache, RoundedKV
from torch_fp8rl.modules import by_global_name, spec_of


class QKVObserver(AmaxTable):
    """Observe the amax of q, k and v per decoder layer.

    The device is not synchronised until :meth:`amax` or :meth:`scales` is called, and activations
    that are recomputed do no harm. Padding tokens are observed like any other token; they can only
    raise a scale. With CPU offload make it after ``fully_shard``, which knows the device.

    Args:
        model: a model of transformers (:func:`torch_fp8rl.convert` says which), or what wraps it.

    Raises:
        UnsupportedError: the model is not served, or attends by ``eager``.
    """

    def __init__(self, model: nn.Module) -> None:
        attentions = _attentions(model)
        super().__init__(len(attentions), tuple(attentions), _device_of(model))
        for layer, module in attentions.items():
            self._handles.append(_Entry(module.fp8_observers, partial(self.see, layer)))


class KVCacheInTraining(RoundedKV):
    """Quantize and dequantize K and V of every decoder layer.

    Scales of E4M3 are set from outside: until :meth:`set` is called, and after :meth:`clear`,
    attention is as upstream's. An INT8 cache needs none, and is in service from the start.
    Gradients pass straight through, also those of clipped values. Observers of the same model go on
    seeing the values before quantization.

    Args:
        model: as for :class:`QKVObserver`.
        dtype: of the rollouts' KV cache.

    Raises:
        UnsupportedError: ``dtype`` is ``auto`` or no dtype of a KV cache; the model is not served,
            attends by ``eager``, or has a ``KVCacheInTraining`` already.
    """

    def __init__(self, model: nn.Module, dtype: KVDtype = "fp8_e4m3") -> None:
        attentions = _attentions(model)
        if any(module.fp8_caches for module in attentions.values()):
            raise UnsupportedError(
                "The model already belongs to a KVCacheInTraining, and two would quantize K and V "
                "twice; use that one, or call its close() first."
            )
        super().__init__(tuple(attentions), _device_of(model), dtype)
        for layer, of_layer in self.of_layers().items():
            self._handles.append(_Entry(attentions[layer].fp8_caches, of_layer))


class Fp8Attention(nn.Module):
    """An attention module that is observed, or attends over K and V of 8 bits."""

    fp8_observers: list[Callable[[Tensor, Tensor, Tensor], None]]
    fp8_caches: list[LayerCache]
    """One at most."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.fp8_observers or self.fp8_caches:
            _wrap(self.config)  # the model may have another implementation by now
        return super().forward(*args, **kwargs)


@dataclass(frozen=True)
class _Attention:
    """An entry of transformers' registry of attention functions."""

    upstream: Callable

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Any:
        if isinstance(module, Fp8Attention) and (module.fp8_observers or module.fp8_caches):
            key, value = _seen(module, query, key, value)
        return self.upstream(module, query, key, value, *args, **more)


@torch.compiler.disable
def _seen(module: Fp8Attention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Show q, k and v to the observers; return K and V as attention is to see them."""
    for observe in module.fp8_observers:
        observe(query, key, value)
    for of_layer in module.fp8_caches:
        if of_layer.in_service:
            of_layer.count(key, value)
            key, value = of_layer.rounded(key, value)
    return key, value


class _Entry:
    """An entry of a list, which can be taken out."""

    def __init__(self, entries: list[Any], entry: Any) -> None:
        self._entries, self._entry = entries, entry
        entries.append(entry)

    def remove(self) -> None:
        self._entries.remove(self._entry)


def _attentions(model: nn.Module) -> dict[int, Any]:
    """Return the attention module of each decoder layer, by number, ready to be observed."""
    spec = spec_of(model)
    modules = by_global_name(model, spec)
    names = [f"{spec.stem}layers.{number}.self_attn" for number in range(len(spec.layers))]
    if missing := next((name for name in names if name not in modules), None):
        raise UnsupportedError(
            f"The model has no '{missing}', which its config describes; give a whole model of "
            "transformers."
        )
    found = dict(enumerate(modules[name] for name in names))
    for module in found.values():
        _wrap(module.config)
    for module in found.values():
        kind = type(module)
        if not isinstance(module, Fp8Attention):
            module.__class__ = type(f"Fp8{kind.__name__}", (Fp8Attention, kind), {})
            module.fp8_observers, module.fp8_caches = [], []  # type: ignore[assignment]
    return found


def _wrap(config: Any) -> None:
    """Wrap the attention function of a model's implementation, if it is not wrapped yet."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = config._attn_implementation
    upstream = ALL_ATTENTION_FUNCTIONS.get(name)
    if upstream is None:
        raise UnsupportedError(
            f"The model attends by '{name}', inside of its own file, where q, k and v cannot be "
            "seen; load it with attn_implementation='sdpa'."
        )
    if not isinstance(upstream, _Attention):
        ALL_ATTENTION_FUNCTIONS[name] = _Attention(upstream)


def _device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model computes."""
    parameter = next(model.parameters())
    if isinstance(parameter, DTensor):  # offloaded, it is on the CPU
        return torch.empty(0, device=parameter.device_mesh.device_type).device
    return parameter.device

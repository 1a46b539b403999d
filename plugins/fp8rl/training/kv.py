"""What FP8 trainers share of the KV cache: the amax of q, k and v, and K and V as a cache holds
them. How a trainer's attention is reached is the engine package's part."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from fp8rl.errors import CheckpointError, ScaleError, UnsupportedError
from fp8rl.kv_scales import (
    ROLES,
    check_scale,
    parse_scale_name,
    require_one_name,
    scale_name,
    scales_from_amax,
)
from fp8rl.numerics import amax_into, fake_quantize_int8_kv, fake_quantize_kv
from fp8rl.recipe import KVDtype

_KEY = "amax"
"""Name of the table in a checkpoint."""


class AmaxTable:
    """The amax of q, k and v per global decoder layer.

    Args:
        num_layers: decoder layers of the whole model.
        layers: see :attr:`layers`.
        device: where activations are.
    """

    def __init__(self, num_layers: int, layers: Sequence[int], device: torch.device) -> None:
        self.num_layers = num_layers
        self.layers = list(layers)
        """Global numbers of the layers with keys and values, on all ranks."""
        self._amax = torch.zeros(num_layers, len(ROLES), device=device)
        self._of_layers = self._amax.unbind()
        self._handles: list[Any] = []

    def see(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise the amax of a layer to what its attention takes; nothing is synchronised."""
        amax_into(self._of_layers[layer], (query, key, value))

    def amax(self, group: torch.distributed.ProcessGroup | None = None) -> Tensor:
        """Reduce the table over all ranks by one all-reduce, which every rank must join.

        The maximum over the world covers heads (tensor parallel), tokens (data and context
        parallel) and layers (pipeline parallel; a rank has zeros where it has no layer).

        Args:
            group: process group with the ranks of this model; the world by default.

        Returns:
            float32 ``[num_layers, 3]`` on the model's device, columns q, k, v. NaN where any
            rank saw a NaN, 0 where no rank saw a token, and in layers without keys and values.
        """
        if not torch.distributed.is_initialized():
            return self._amax.clone()
        # The backends disagree on max(NaN, x), so NaN travels as a flag of its own.
        is_nan = self._amax.isnan()
        both = torch.stack([self._amax.masked_fill(is_nan, 0.0), is_nan.float()])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=group)
        return both[0].masked_fill(both[1] > 0, torch.nan)

    def scales(
        self, margin: float, group: torch.distributed.ProcessGroup | None = None
    ) -> dict[str, Tensor]:
        """Return :func:`fp8rl.kv_scales.scales_from_amax` of :meth:`amax`, the same on every rank.

        Raises:
            ScaleError: on every rank, if a layer saw no token, or a NaN or infinite activation.
        """
        return scales_from_amax(self.amax(group), margin, self.layers)

    def reset(self) -> None:
        """Forget what was seen, e.g. after an optimizer step has changed the activations."""
        self._amax.zero_()

    def close(self) -> None:
        """Remove the hooks; what was seen stays readable."""
        _remove(self._handles)

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's table on the CPU: ``{"amax": float32 [num_layers, 3]}``.

        A pipeline or tensor-parallel rank saw its own part only: a checkpoint that one rank writes
        for all stores :meth:`amax` under the same key instead.
        """
        return {_KEY: self._amax.cpu().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved table; what was seen so far is replaced.

        Raises:
            CheckpointError: the state does not belong to an observer of this model.
        """
        own = self._amax
        table = state.get(_KEY) if isinstance(state, Mapping) and set(state) == {_KEY} else None
        if not isinstance(table, Tensor):
            raise CheckpointError(
                f"The observer's state is {reprlib.repr(state)}, it needs '{_KEY}' alone; "
                "give what state_dict() of an observer returned."
            )
        if table.shape != own.shape or table.dtype != own.dtype:
            raise CheckpointError(
                f"The observer's '{_KEY}' is {table.dtype} {tuple(table.shape)}, it must be "
                f"{str(own.dtype).removeprefix('torch.')} {tuple(own.shape)}; the checkpoint is of "
                "another model."
            )
        own.copy_(table.abs())  # of a NaN too: kernels compare the bits of magnitudes


class RoundedKV:
    """Quantize and dequantize K and V of decoder layers, as the rollout's cache does.

    Scales of E4M3 are set from outside: until :meth:`set` is called, and after :meth:`clear`,
    attention is as upstream's. An INT8 cache needs none, and is in service from the start.
    Gradients pass straight through, also those of clipped values.

    Args:
        layers: global numbers of the layers of this rank.
        device: where activations are.
        dtype: of the rollouts' KV cache.

    Raises:
        UnsupportedError: see :func:`check_dtype`.
    """

    def __init__(self, layers: Sequence[int], device: torch.device, dtype: KVDtype) -> None:
        check_dtype(dtype)
        self.has_scales = dtype == "fp8_e4m3"
        """Whether :meth:`set` must be called with the scales of each refit."""
        self.in_service = not self.has_scales
        """Whether forwards quantize K and V."""
        self._layers = tuple(layers)
        self._scales = torch.ones(len(layers), 2, device=device)
        self._clipped = torch.zeros(len(layers), 2, dtype=torch.int64, device=device)
        self._seen = [0, 0]
        self._handles: list[Any] = []

    def of_layers(self) -> dict[int, LayerCache]:
        """Return what the attention of each layer needs, by global number."""
        cells = zip(self._layers, self._scales, self._clipped, strict=True)
        return {
            layer: LayerCache(self, scales if self.has_scales else None, clipped)
            for layer, scales, clipped in cells
        }

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
        _remove(self._handles)


@dataclass(frozen=True, eq=False)
class LayerCache:
    """Attention of one layer over K and V as the cache holds them."""

    cache: RoundedKV
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
            self.cache._seen[0] += key.numel()
            self.cache._seen[1] += value.numel()

    def rounded(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V as the cache holds them, with the gradient of the identity."""
        if self.scales is None:
            return _RoundedToInt8.apply(key, value)
        return _RoundedToE4M3.apply(key, value, self.scales, self.clipped)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def check_dtype(dtype: KVDtype) -> None:
    """Refuse a dtype in which a KV cache rounds nothing, or that no cache has.

    Raises:
        UnsupportedError: ``dtype`` is ``auto`` or no dtype of a KV cache.
    """
    if dtype == "auto":
        raise UnsupportedError(
            "A KV cache of dtype 'auto' holds K and V as they are; make no KVCacheInTraining, "
            "or set kv_cache.dtype to fp8_e4m3 or int8_per_token_head."
        )
    if dtype not in get_args(KVDtype):
        raise UnsupportedError(
            f"There is no KV cache of dtype {dtype!r}; use 'fp8_e4m3' or 'int8_per_token_head'."
        )


def _by_canonical_name(scales: Mapping[str, Tensor | float]) -> dict[str, Tensor | float]:
    """Return the scales by the names of ``scale_name``; entries with other names are left out."""
    places = [(name, parse_scale_name(str(name))) for name in scales]
    names = require_one_name((name, place) for name, place in places if place is not None)
    return {scale_name(*place): scales[name] for place, name in names.items()}


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

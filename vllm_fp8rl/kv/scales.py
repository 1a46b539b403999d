"""KV scales of a live model: set by their names on the wire, validated, effective at once.

What loaders have set is kept in the :class:`~vllm_fp8rl.engine.rank_state.LayerKVScales` of each
attention layer, and written from there to every place where attention reads it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from numbers import Real
from typing import Any

import torch

from fp8rl.errors import ScaleError
from fp8rl.kv_scales import ROLES, Role, check_scale, parse_scale_name, require_one_name, scale_name
from fp8rl.listing import number_ranges
from vllm_fp8rl.engine.rank_state import LayerKVScales, find_state, state_of
from vllm_fp8rl.storage.block_grid import WriteBatch

Fill = Callable[[torch.Tensor, float], object]
"""Writes a number into a float32 tensor, perhaps later."""

Place = tuple[int, Role]
"""Global number of a layer, and which of its scales."""

_CACHED: tuple[Role, ...] = ("k", "v")
"""Roles with codes in the KV cache; queries are quantized in each step."""


def set_kv_scales(model: torch.nn.Module, scales: Mapping[str, torch.Tensor | float]) -> None:
    """Set scales by their names on the wire; all are checked before the first is set.

    Call ``reset_prefix_cache()`` afterwards: cached blocks hold codes of the old scales, and until
    it has answered True the engine refuses to run.

    Args:
        model: the live vLLM model of this rank.
        scales: ``model.layers.N.self_attn.{k,v}_scale`` or ``.attn.{q,k,v}_scale`` -> the factor
            that multiplies codes back.

    Raises:
        ScaleError: a name that the model does not have, two names of one scale, or a value that is
            0, negative, NaN, infinite or not one element.
        RefitError: a refit or another load is under way, or the engine's weights sleep.
    """
    given = by_place(scales, "KV scales")
    found = list(fp8_layers(model))
    layers = {own.index: layer for layer, own in found}
    by_index = {own.index: own for _, own in found}
    require_layers(model, given)
    values = {index: dict(own.values) for index, own in by_index.items()}
    for (index, role), value in given.items():
        values[index][role] = value
    if not scales:
        return
    guard = state_of(model).guard
    guard.require_free("New KV scales")
    guard.require_awake()
    if scales_change(model, scales):
        guard.begin_scale_epoch()
    guard.restore()  # where what follows is interrupted, the next step does it
    # In one go: Ctrl-C interrupts no call of C, and a half of the scales is never left behind.
    deque(map(setattr, by_index.values(), repeat("values"), values.values()), maxlen=0)
    batch = WriteBatch()
    for index, role in given:
        _publish(layers[index], role, by_index[index].in_use(role), batch.fill)
    batch.run()


def scales_change(model: torch.nn.Module, scales: Mapping[str, torch.Tensor | float]) -> bool:
    """Tell whether a K or V scale differs from the one in service: then cached codes are wrong."""
    held = kv_scale_state(model)
    given = by_place(scales, "KV scales")
    changed = {key for key, value in given.items() if held.get(key) != value}
    return any(role in _CACHED for _, role in changed)


def forget_kv_scales(model: torch.nn.Module) -> None:
    """Remove all scales, since weights have changed; the engine refuses to run without new ones."""
    for layer, scales in fp8_layers(model):
        scales.values.clear()
        publish_scales(layer)
        state_of(model).guard.recheck()


def kv_scale_state(model: torch.nn.Module) -> dict[tuple[int, Role], float]:
    """Return (global layer number, role) -> value, for every scale that a loader has set."""
    return {
        (scales.index, role): value
        for _, scales in fp8_layers(model)
        for role, value in scales.values.items()
    }


def required_kv_scales(model: torch.nn.Module) -> set[str]:
    """Return the wire names of the scales that generation needs, loaded or not."""
    return {
        scale_name(scales.index, role)
        for layer, scales in fp8_layers(model)
        for role in scales.required(layer)
    }


def missing_kv_scales(model: torch.nn.Module) -> list[str]:
    """Return the wire names of the scales that generation needs and that no loader has set."""
    return [name for layer, scales in fp8_layers(model) for name in scales.missing(layer)]


def publish_scales(layer: Any) -> None:
    """Write the loaded scales, and a placeholder for missing ones, to where vLLM reads them."""
    scales = _scales_of(layer)
    if scales is not None:
        for role in ROLES:
            _publish(layer, role, scales.in_use(role))
        layer._prob_scale.fill_(1.0)  # softmax output lies in [0, 1]: nothing to calibrate


def fp8_layers(model: torch.nn.Module) -> Iterator[tuple[Any, LayerKVScales]]:
    """Yield the attention layers with an FP8 cache, and what loaders have set for them."""
    state = find_state(model)
    if state is not None:
        for name, scales in state.kv_scales.items():
            yield state.layers[name], scales


def _scales_of(layer: Any) -> LayerKVScales | None:
    return layer.quant_method.state.kv_scales.get(layer.layer_name)


def by_place(scales: Mapping[str, torch.Tensor | float], what: str) -> dict[Place, float]:
    """Return scales by (global layer number, role), as :func:`checked_scale` rounds them."""
    if not isinstance(scales, Mapping):
        raise ScaleError(
            f"{what} come as a mapping of names and numbers, not as {type(scales).__name__}."
        )
    values = {name: checked_scale(name, scale) for name, scale in scales.items()}
    places = [(name, parse_scale_name(name)) for name in values]
    names = require_one_name((name, place) for name, place in places if place is not None)
    return {place: values[name] for place, name in names.items()}


def require_layers(model: torch.nn.Module, places: Iterable[Place]) -> None:
    """Raise ScaleError for the place of a scale in a layer without an FP8 KV cache."""
    layers = sorted(own.index for _, own in fp8_layers(model))
    for index, role in places:
        if index not in layers:
            raise ScaleError(
                f"'{scale_name(index, role)}' is no KV scale of this model, which has an FP8 KV "
                f"cache in layers {number_ranges(layers)}; use names such as "
                f"'{scale_name(0, 'k')}'."
            )


def checked_scale(name: str, scale: torch.Tensor | float) -> float:
    """Return a scale, checked and rounded to float32, as engines keep it: 1e-50 counts as 0."""
    if not isinstance(name, str) or parse_scale_name(name) is None:
        raise ScaleError(f"{name!r} is no name of a KV scale; use such as '{scale_name(0, 'k')}'.")
    if not isinstance(scale, (Real, torch.Tensor)) or isinstance(scale, bool):
        raise ScaleError(f"KV scale '{name}' is {scale!r}; send one number.")
    if not isinstance(scale, torch.Tensor):
        scale = torch.tensor(scale, dtype=torch.float32)
    return check_scale(name, scale.float() if scale.is_floating_point() else scale)


def _publish(layer: Any, role: Role, value: float, fill: Fill = torch.Tensor.fill_) -> None:
    """Write one scale to the parameter and to every copy that attention backends read."""
    fill(getattr(layer, f"{role}_scale").data, value)
    fill(getattr(layer, f"_{role}_scale"), value)
    setattr(layer, f"_{role}_scale_float", value)
    host = getattr(layer, f"_{role}_scale_cpu", None)  # from vLLM 0.26 on, for k and v
    if host is not None:
        fill(host, value)
    for cached in ("bmm1_scale", "bmm2_scale"):  # FlashInfer caches products of the scales
        if getattr(layer.impl, cached, None) is not None:
            setattr(layer.impl, cached, None)


def scale_loader(layer: torch.nn.Module, role: Role) -> Callable[..., None]:
    """Return the ``weight_loader`` of one scale parameter of an attention layer."""
    # Weak, because vLLM keeps loaders in a table that must not keep the model alive.
    reference: weakref.ref[Any] = weakref.ref(layer)

    def load_kv_scale(
        param: torch.Tensor, loaded_weight: torch.Tensor, fill: Fill = torch.Tensor.fill_
    ) -> None:
        owner = reference()
        assert owner is not None, "a weight loader outlived its layer"
        scales = _scales_of(owner)
        assert scales is not None
        value = checked_scale(scale_name(scales.index, role), loaded_weight)
        if role in _CACHED and scales.values.get(role) != value:
            owner.quant_method.state.guard.begin_scale_epoch()
        scales.values[role] = value
        if scales.provisional is None:
            _publish(owner, role, value, fill)

    return load_kv_scale

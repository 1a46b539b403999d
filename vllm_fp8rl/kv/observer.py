"""amax of q, k and v in a live model's attention layers, observed where vLLM calls attention.

vLLM reaches a layer's attention through ``layer.impl``, from opaque operations that run on the host
in eager mode and between piecewise CUDA graphs (not inside full ones, which vLLM takes for steps of
one token a request). :class:`ObservedImpl` wraps that object during a calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8rl.errors import RefitError
from fp8rl.kv_scales import ROLES, scale_name
from fp8rl.numerics import E4M3_MAX, FP8_DTYPE
from vllm_fp8rl.engine.rank_state import LayerKVScales, state_of
from vllm_fp8rl.kv.scales import by_place, fp8_layers, publish_scales, require_layers

_HALF_STEP = 1 + 1 / 16
"""An E4M3 code stands for values up to this factor larger."""
_OTHER_CODES = "codes of a calibration's or of older KV scales"
_NOT_OBSERVED = "No KV scales are being observed on this worker; call fp8rl_observe_kv first."
_BEYOND = 16.0
"""How much larger than the largest code a clipped query is taken to be, for another try."""


class ObservedImpl:
    """Wraps a layer's attention implementation and notes the amax of its inputs."""

    def __init__(self, impl: Any, device: torch.device) -> None:
        self.impl = impl
        self.amax = {role: torch.zeros((), device=device) for role in ROLES}
        self.tokens = torch.zeros((), dtype=torch.int64, device=device)
        self.quantized_queries = False
        """Whether queries come quantized with the layer's q scale."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        used = slot_mapping >= 0  # the rest is padding to the size of a graph
        self.tokens += used.sum()
        for role, x in (("k", key), ("v", value)):
            largest = x[: used.numel()].flatten(1).abs().amax(1).float()
            self._note(role, largest.masked_fill(~used, 0.0).amax())
        self.impl.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attn_metadata is not None:
            self.quantized_queries = query.dtype == FP8_DTYPE
            self._note("q", query[: attn_metadata.num_actual_tokens].float().abs().amax())
        return self.impl.forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)

    def _note(self, role: str, value: torch.Tensor) -> None:
        self.amax[role] = torch.maximum(self.amax[role], value)  # type: ignore[index]


def start_observing(model: torch.nn.Module, provisional: Mapping[str, float]) -> None:
    """Start to note amax, from zero, with provisional scales in attention.

    The engine refuses to run until :func:`admit_calibration`. Loaded scales stay as they are; they
    are in use again after :func:`stop_observing`.

    Args:
        model: the model of this rank.
        provisional: scales by their names on the wire; missing ones are 1, which lets magnitudes
            up to 448 through unclipped, with E4M3's full precision above 1/64.

    Raises:
        RefitError: a refit or another load is under way, or the engine's weights sleep.
        ScaleError: a bad scale, two names of one, or a layer without an FP8 KV cache.
    """
    given = by_place(provisional, "Provisional KV scales")
    require_layers(model, given)
    guard = state_of(model).guard
    guard.require_free("A calibration of KV scales")
    guard.require_awake()
    guard.calibrate("closed")
    guard.outdate_cache(_OTHER_CODES)
    for layer, scales in fp8_layers(model):
        layer.impl = _own(layer)  # publishing clears what some implementations cache of the scales
        scales.provisional = {role: given.get((scales.index, role), 1.0) for role in ROLES}
        publish_scales(layer)
        layer.impl = ObservedImpl(layer.impl, layer._k_scale.device)


def admit_calibration(model: torch.nn.Module, admitted: bool) -> None:
    """Let the steps of a calibration pass, or refuse every step again."""
    guard = state_of(model).guard
    if not guard.calibrating:
        raise RefitError(_NOT_OBSERVED)
    guard.calibrate("running" if admitted else "closed")


def observed(model: torch.nn.Module) -> dict[str, Any]:
    """Return what this rank has observed since :func:`start_observing`, as plain data.

    Returns:
        ``amax`` by the names of the scales that generation needs; ``tokens``, the number that every
        layer saw; ``clipped``, whether queries were clipped, so that their amax is an estimate;
        ``margin`` of the engine's recipe.

    Raises:
        RefitError: nothing is being observed.
    """
    amax: dict[str, float] = {}
    tokens: list[int] = []
    clipped, margin = False, 1.0
    for layer, scales in fp8_layers(model):
        if not isinstance(layer.impl, ObservedImpl):
            raise RefitError(_NOT_OBSERVED)
        tokens.append(int(layer.impl.tokens))
        margin = layer.quant_method.state.recipe.kv_cache.margin
        for role in scales.required(layer):
            value = layer.impl.amax[role].item()
            if role == "q" and layer.impl.quantized_queries:
                value, beyond = _unquantized(value, scales)
                clipped |= beyond
            amax[scale_name(scales.index, role)] = value
    return {"amax": amax, "tokens": min(tokens, default=0), "clipped": clipped, "margin": margin}


def stop_observing(model: torch.nn.Module) -> None:
    """Remove the observers and put the loaded scales back; do nothing if there are none."""
    guard = state_of(model).guard
    if not guard.calibrating:
        return
    guard.outdate_cache(_OTHER_CODES)
    for layer, scales in fp8_layers(model):
        layer.impl, scales.provisional = _own(layer), None
        publish_scales(layer)
    guard.calibrate(None)  # last: an interrupted call leaves the engine closed


def _own(layer: Any) -> Any:
    """Return the layer's own attention implementation."""
    return layer.impl.impl if isinstance(layer.impl, ObservedImpl) else layer.impl


def _unquantized(code: float, scales: LayerKVScales) -> tuple[float, bool]:
    """Return the largest |query| that quantizes to ``code``, and whether it may be too small.

    The layer quantizes queries before vLLM calls attention.
    """
    beyond = code >= E4M3_MAX
    return code * scales.in_use("q") * (_BEYOND if beyond else _HALF_STEP), beyond

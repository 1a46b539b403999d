"""KV-cache scales of a live vLLM model: loaded by name, validated, effective at once.

vLLM's own ``BaseKVCacheMethod`` deletes its scale parameters after the first load, so that later
ones are skipped in silence, and falls back to scale 1.0. Here the parameters stay, only a value
that a loader set counts, and until one has come the scale is NaN: no attention backend can use it
and look right. The CPU backend goes further and refuses to run, see :func:`require_kv_scales`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import is_quantized_kv_cache

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import ROLES, Role, check_scale, parse_scale_name, scale_name

logger = init_logger("vllm.fp8rl")

FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
"""Values of ``kv_cache_dtype`` that mean E4M3 with one scale a tensor."""

_STATE = "fp8rl_kv_scales"


def check_kv_cache_dtype(kv_cache_dtype: str) -> bool:
    """Whether the cache is FP8.

    Raises:
        UnsupportedError: a quantized cache of another format than E4M3 with per-tensor scales.
    """
    if not is_quantized_kv_cache(kv_cache_dtype):
        return False
    if kv_cache_dtype not in FP8_KV_DTYPES:
        raise UnsupportedError(
            f"fp8rl has no KV cache of dtype '{kv_cache_dtype}'; set kv_cache_dtype to 'fp8' "
            "(E4M3, one scale a tensor) or 'auto'."
        )
    return True


@dataclass
class LayerKVScales:
    """What loaders have set so far for one attention layer, by role; float32 values."""

    index: int
    """Global number of the decoder layer."""
    values: dict[Role, float] = field(default_factory=dict)

    def required(self, layer: torch.nn.Module) -> tuple[Role, ...]:
        """Roles without which ``layer`` cannot run; q only where the backend quantizes queries."""
        return ROLES if getattr(layer, "query_quant", None) is not None else ("k", "v")


class Fp8RLKVCacheMethod(BaseKVCacheMethod):
    """Scale parameters ``q_scale``, ``k_scale``, ``v_scale`` of an ``Attention`` layer.

    Stateless, because vLLM asks for a new method object whenever it post-processes a layer; the
    state is the layer's :class:`LayerKVScales`. On a layer whose cache is not FP8 it does nothing.
    """

    supports_pre_processed_weights = False

    def create_weights(self, layer: Any) -> None:
        """Register the parameters, float32 scalars.

        A layerwise reload calls this again on a live layer: loaded values then stay.

        Raises:
            UnsupportedError: see :func:`check_kv_cache_dtype`.
        """
        if not check_kv_cache_dtype(layer.kv_cache_dtype):
            return
        if _state_of(layer) is None:
            setattr(layer, _STATE, LayerKVScales(extract_layer_index(layer.layer_name)))
        for role in ROLES:
            parameter = torch.nn.Parameter(
                torch.full((), torch.nan, dtype=torch.float32), requires_grad=False
            )
            parameter.weight_loader = _loader(layer, role)  # type: ignore[attr-defined]
            layer.register_parameter(f"{role}_scale", parameter)
        _publish_all(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the loaded values back wherever vLLM keeps a copy; any number of times.

        ``load_format=dummy`` writes random numbers into parameters and buffers alike, so whatever
        no loader set becomes NaN again.
        """
        state = _publish_all(layer)
        # The CPU backend refuses to attend without scales. vLLM's GPU backends cannot be asked to
        # (captured graphs run no Python): there the output is NaN, so say it once at the start.
        if state is not None and state.index == 0 and layer.k_scale.is_cuda and _missing(layer):
            logger.warning(
                "KV scale '%s' was never loaded: until a refit or set_kv_scales brings the scales "
                "of every layer, this engine's output is NaN.",
                _missing(layer)[0],
            )


def set_kv_scales(model: torch.nn.Module, scales: Mapping[str, torch.Tensor | float]) -> None:
    """Set scales by their names on the wire; all are checked before the first is set.

    Call ``reset_prefix_cache()`` afterwards: cached blocks hold codes of the old scales.

    Args:
        model: the live vLLM model of this rank.
        scales: ``model.layers.N.self_attn.{k,v}_scale`` or ``.attn.{q,k,v}_scale`` -> the factor
            that multiplies codes back.

    Raises:
        ScaleError: a name that the model does not have, or a value that is 0, negative, NaN,
            infinite or not one element.
    """
    layers = {state.index: layer for layer, state in _fp8_layers(model)}
    checked: list[tuple[torch.nn.Module, Role, float]] = []
    for name, scale in scales.items():
        parsed = parse_scale_name(name)
        if parsed is None or parsed[0] not in layers:
            raise ScaleError(
                f"'{name}' is no KV scale of this model, which has an FP8 KV cache in layers "
                f"{sorted(layers)}; use names such as '{scale_name(0, 'k')}'."
            )
        checked.append((layers[parsed[0]], parsed[1], _checked(name, scale)))
    for layer, role, value in checked:
        _commit(layer, role, value)


def set_uncalibrated_kv_scales(model: torch.nn.Module, value: float) -> None:
    """Give every layer and role the same scale, knowingly, without calibration.

    For a standalone engine whose checkpoint has no scales and that gets no refit. ``value * 448``
    is the largest magnitude that K and V can have without being clipped: 0.05 suits the RMS-normed
    keys of a Qwen3. ``llm.apply_model(functools.partial(set_uncalibrated_kv_scales, value=0.05))``
    reaches every worker; with engine processes it needs ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.

    Raises:
        ScaleError: the model has no FP8 KV cache, or a bad value.
    """
    indices = [state.index for _, state in _fp8_layers(model)]
    if not indices:
        raise ScaleError(
            "The model has no FP8 KV cache to scale; start the engine with kv_cache_dtype='fp8'."
        )
    set_kv_scales(model, {scale_name(i, role): value for i in indices for role in ROLES})


def kv_scale_state(model: torch.nn.Module) -> dict[tuple[int, Role], float]:
    """(global layer number, role) -> value, for every scale that a loader has set."""
    return {
        (state.index, role): value
        for _, state in _fp8_layers(model)
        for role, value in state.values.items()
    }


def required_kv_scales(model: torch.nn.Module) -> set[str]:
    """Names on the wire of the scales that generation needs, loaded or not."""
    return {
        scale_name(state.index, role)
        for layer, state in _fp8_layers(model)
        for role in state.required(layer)
    }


def missing_kv_scales(model: torch.nn.Module) -> list[str]:
    """Names on the wire of the scales that generation needs and that no loader has set yet."""
    return [name for layer, _ in _fp8_layers(model) for name in _missing(layer)]


def require_kv_scales(*layers: torch.nn.Module) -> None:
    """Raise unless every FP8 attention layer has the scales that generation needs.

    Args:
        layers: a model, or attention layers.

    Raises:
        ScaleError: names the first missing scale and the remedies.
    """
    missing = [name for layer in layers for name in missing_kv_scales(layer)]
    if missing:
        raise ScaleError(
            f"KV scale '{missing[0]}' was never loaded ({len(missing)} missing): the FP8 KV cache "
            "does not start from scale 1.0. Send the scales with a refit, store them in the "
            "checkpoint, call vllm_fp8rl.kv_cache.set_uncalibrated_kv_scales, or set "
            "kv_cache_dtype='auto'."
        )


def _publish_all(layer: Any) -> LayerKVScales | None:
    """Put what the loaders have set, and NaN for the rest, where vLLM reads it."""
    state = _state_of(layer)
    if state is not None:
        for role in ROLES:
            _publish(layer, role, state.values.get(role, torch.nan))
        layer._prob_scale.fill_(1.0)  # softmax output lies in [0, 1]: nothing to calibrate
    return state


def _state_of(layer: torch.nn.Module) -> LayerKVScales | None:
    return getattr(layer, _STATE, None)


def _fp8_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LayerKVScales]]:
    for module in model.modules():
        state = _state_of(module)
        if state is not None:
            yield module, state


def _missing(layer: torch.nn.Module) -> list[str]:
    state = _state_of(layer)
    if state is None:
        return []
    return [scale_name(state.index, r) for r in state.required(layer) if r not in state.values]


def _checked(name: str, scale: torch.Tensor | float) -> float:
    # Engines keep float32: check what they will keep, so that 1e-50 counts as 0.
    return check_scale(name, torch.as_tensor(scale, dtype=torch.float32))


def _commit(layer: torch.nn.Module, role: Role, value: float) -> None:
    state = _state_of(layer)
    assert state is not None
    state.values[role] = value
    _publish(layer, role, value)


def _publish(layer: Any, role: Role, value: float) -> None:
    """Write one scale to the parameter and to every copy that attention backends read."""
    getattr(layer, f"{role}_scale").data.fill_(value)
    getattr(layer, f"_{role}_scale").fill_(value)
    setattr(layer, f"_{role}_scale_float", value)
    host = getattr(layer, f"_{role}_scale_cpu", None)  # vLLM 0.32, for k and v
    if host is not None:
        host.fill_(value)
    for cached in ("bmm1_scale", "bmm2_scale"):  # FlashInfer caches products of the scales
        if getattr(layer.impl, cached, None) is not None:
            setattr(layer.impl, cached, None)


def _loader(layer: torch.nn.Module, role: Role) -> Callable[[torch.Tensor, torch.Tensor], None]:
    # Weak, because vLLM keeps loaders in a table that must not keep the model alive.
    reference = weakref.ref(layer)

    def load_kv_scale(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        owner = reference()
        assert owner is not None, "a weight loader outlived its layer"
        state = _state_of(owner)
        assert state is not None
        value = _checked(scale_name(state.index, role), loaded_weight)
        if param.is_meta:  # a layerwise reload counts first and loads later
            param.data.copy_(loaded_weight.reshape(()))
            return
        _commit(owner, role, value)

    return load_kv_scale

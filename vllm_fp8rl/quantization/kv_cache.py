"""KV-cache scales of a live vLLM model: loaded by name, validated, effective at once.

vLLM's own ``BaseKVCacheMethod`` deletes its scale parameters after the first load, so that later
ones are skipped in silence, and falls back to scale 1.0. Here the parameters stay, only a value
that a loader set counts, and until one has come the engine refuses to run
(:class:`~vllm_fp8rl.guard.RefitGuard`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from numbers import Real
from typing import Any

import torch
from vllm.config import CompilationConfig, get_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import ROLES, Role, check_scale, parse_scale_name, scale_name
from vllm_fp8rl.guard import guarded
from vllm_fp8rl.state import UNSET, LayerKVScales, RankState, find_state, state_of
from vllm_fp8rl.storage.block_grid import WriteBatch

FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
"""Values of ``kv_cache_dtype`` that mean E4M3 with one scale a tensor."""
_PLAIN_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")

Fill = Callable[[torch.Tensor, float], object]
"""Writes a number into a float32 tensor, perhaps later."""

_OLDER_CODES = "codes of older KV scales"
_READ_AT_EACH_STEP = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales from tensors, or from the layer at each call."""
_BAKES_INTO_FULL_GRAPHS = "FLASHINFER"
"""Takes the scales as host numbers."""


def check_kv_cache_dtype(kv_cache_dtype: str) -> bool:
    """Return whether the cache is FP8.

    Raises:
        UnsupportedError: a cache of another format than E4M3 with per-tensor scales.
    """
    if kv_cache_dtype in _PLAIN_KV_DTYPES:
        return False
    if kv_cache_dtype not in FP8_KV_DTYPES:
        raise UnsupportedError(
            f"fp8rl has no KV cache of dtype '{kv_cache_dtype}'; set kv_cache_dtype to 'fp8' "
            "(E4M3, one scale a tensor) or 'auto'."
        )
    return True


def check_backend(name: str, compilation: CompilationConfig) -> None:
    """Raise UnsupportedError for an attention backend that would not see new scales.

    Args:
        name: name of the backend in vLLM.
        compilation: compilation config of the engine.
    """
    if name in _READ_AT_EACH_STEP:
        return
    if name != _BAKES_INTO_FULL_GRAPHS:
        raise UnsupportedError(
            f"Attention backend '{name}' is not known to read new KV scales; choose one of "
            f"{', '.join(_READ_AT_EACH_STEP)} with attention_backend=..., or set "
            "kv_cache_dtype='auto'."
        )
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
        raise UnsupportedError(
            f"Attention backend '{name}' writes KV scales into full CUDA graphs as constants, so "
            "that new ones would have no effect; choose attention_backend='FLASH_ATTN' or "
            "'TRITON_ATTN', or set compilation_config={'cudagraph_mode': 'PIECEWISE'}."
        )


class Fp8RLKVCacheMethod(BaseKVCacheMethod):
    """Scale parameters ``q_scale``, ``k_scale``, ``v_scale`` of an ``Attention`` layer.

    vLLM asks for a new method object whenever it post-processes a layer, so what loaders have set
    is kept in the :class:`~vllm_fp8rl.state.RankState`, by the layer's name. On a layer whose cache
    is not FP8 the method only inserts the guard.

    Args:
        quant_config: quantization config of the engine.
        state: state of this rank.
    """

    supports_pre_processed_weights = False

    def __init__(self, quant_config: QuantizationConfig, state: RankState) -> None:
        super().__init__(quant_config)
        self.state = state

    def create_weights(self, layer: Any) -> None:
        """Register the parameters, float32 scalars.

        Raises:
            UnsupportedError: see :func:`check_kv_cache_dtype` and :func:`check_backend`; or the
                layer's name has no number.
        """
        fp8 = check_kv_cache_dtype(layer.kv_cache_dtype)
        if fp8:
            engine = get_current_vllm_config()
            check_backend(layer.attn_backend.get_name(), engine.compilation_config)
            scales = LayerKVScales(_layer_number(layer.layer_name))
            self.state.kv_scales[layer.layer_name] = scales
        layer.attn_backend = guarded(layer.attn_backend)
        if not fp8:
            return
        for role in ROLES:
            parameter = torch.nn.Parameter(
                torch.full((), UNSET, dtype=torch.float32), requires_grad=False
            )
            parameter.weight_loader = _loader(layer, role)  # type: ignore[attr-defined]
            layer.register_parameter(f"{role}_scale", parameter)
        publish_scales(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the loaded values back wherever vLLM keeps a copy; any number of times.

        ``load_format=dummy`` writes random numbers into parameters and buffers alike, so whatever
        no loader set becomes the placeholder again.
        """
        publish_scales(layer)

    def restore(self, layer: Any) -> None:
        """Write the loaded values again, which a sleep or vLLM's wake-up may have overwritten."""
        publish_scales(layer)

    def require_ready(self, layer: Any) -> None:
        """Raise ScaleError, for all layers at once, unless this one has the scales it needs."""
        scales = self.state.kv_scales.get(layer.layer_name)
        if scales is None or scales.provisional is not None or not _missing(layer, scales):
            return
        missing = [name for each, own in _fp8_layers(self.state) for name in _missing(each, own)]
        raise ScaleError(
            f"KV scale '{missing[0]}' was never loaded ({len(missing)} missing): the FP8 KV cache "
            "does not start from scale 1.0. Send the scales with a refit, store them in the "
            "checkpoint, call vllm_fp8rl.calibration.calibrate_kv_scales or "
            "vllm_fp8rl.calibration.set_uncalibrated_kv_scales, or set kv_cache_dtype='auto'."
        )


def set_kv_scales(model: torch.nn.Module, scales: Mapping[str, torch.Tensor | float]) -> None:
    """Set scales by their names on the wire; all are checked before the first is set.

    Call ``reset_prefix_cache()`` afterwards: cached blocks hold codes of the old scales, and until
    it has answered True the engine refuses to run.

    Args:
        model: the live vLLM model of this rank.
        scales: ``model.layers.N.self_attn.{k,v}_scale`` or ``.attn.{q,k,v}_scale`` -> the factor
            that multiplies codes back.

    Raises:
        ScaleError: a name that the model does not have, or a value that is 0, negative, NaN,
            infinite or not one element.
        RefitError: the engine's weights sleep.
    """
    require_mapping(scales, "KV scales")
    found = list(fp8_layers(model))
    layers = {own.index: layer for layer, own in found}
    by_index = {own.index: own for _, own in found}
    values = {index: dict(own.values) for index, own in by_index.items()}
    given: list[tuple[int, Role]] = []
    for name, scale in scales.items():
        value = checked_scale(name, scale)
        parsed = parse_scale_name(name)
        if parsed is None or parsed[0] not in layers:
            raise ScaleError(
                f"'{name}' is no KV scale of this model, which has an FP8 KV cache in layers "
                f"{sorted(layers)}; use names such as '{scale_name(0, 'k')}'."
            )
        values[parsed[0]][parsed[1]] = value
        given.append(parsed)
    if not scales:
        return
    guard = state_of(model).guard
    guard.require_awake()
    if any(own.values != values[index] for index, own in by_index.items()):
        guard.outdate_cache(_OLDER_CODES)
    guard.restore()  # where what follows is interrupted, the next step does it
    # In one go: Ctrl-C interrupts no call of C, and a half of the scales is never left behind.
    deque(map(setattr, by_index.values(), repeat("values"), values.values()), maxlen=0)
    batch = WriteBatch()
    for index, role in given:
        _publish(layers[index], role, by_index[index].in_use(role), batch.fill)
    batch.run()


def forget_kv_scales(model: torch.nn.Module) -> None:
    """Remove all scales, as those of older weights; the engine refuses to run without new ones."""
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
    return [name for layer, scales in fp8_layers(model) for name in _missing(layer, scales)]


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
    return iter(()) if state is None else _fp8_layers(state)


def _fp8_layers(state: RankState) -> Iterator[tuple[Any, LayerKVScales]]:
    for name, scales in state.kv_scales.items():
        yield state.layers[name], scales


def _scales_of(layer: Any) -> LayerKVScales | None:
    return layer.quant_method.state.kv_scales.get(layer.layer_name)


def _missing(layer: torch.nn.Module, scales: LayerKVScales) -> list[str]:
    return [scale_name(scales.index, r) for r in scales.required(layer) if r not in scales.values]


def require_mapping(scales: object, what: str) -> None:
    """Raise ScaleError for scales in anything but a mapping.

    Args:
        scales: the caller's argument.
        what: name of the scales in the message.
    """
    if not isinstance(scales, Mapping):
        raise ScaleError(
            f"{what} come as a mapping of names and numbers, not as {type(scales).__name__}."
        )


def checked_scale(name: str, scale: torch.Tensor | float) -> float:
    """Return a scale rounded to float32, as engines keep it: 1e-50 counts as 0.

    Raises:
        ScaleError: not the name of a KV scale, or see :func:`fp8rl.kv_scales.check_scale`.
    """
    if not isinstance(name, str) or parse_scale_name(name) is None:
        raise ScaleError(f"{name!r} is no name of a KV scale; use such as '{scale_name(0, 'k')}'.")
    if not isinstance(scale, (Real, torch.Tensor)) or isinstance(scale, bool):
        raise ScaleError(f"KV scale '{name}' is {scale!r}; send one number.")
    return check_scale(name, torch.as_tensor(scale, dtype=torch.float32))


def _layer_number(name: str) -> int:
    """Return the global number of a layer, which the names of its scales on the wire have."""
    number = next((part for part in name.split(".") if part.isdigit()), None)
    if number is None:
        raise UnsupportedError(
            f"Attention layer '{name}' has no number in its name, so KV scales cannot be sent to "
            "it; set kv_cache_dtype='auto'."
        )
    return int(number)


def _publish(layer: Any, role: Role, value: float, fill: Fill = torch.Tensor.fill_) -> None:
    """Write one scale to the parameter and to every copy that attention backends read."""
    fill(getattr(layer, f"{role}_scale").data, value)
    fill(getattr(layer, f"_{role}_scale"), value)
    setattr(layer, f"_{role}_scale_float", value)
    host = getattr(layer, f"_{role}_scale_cpu", None)  # vLLM 0.32, for k and v
    if host is not None:
        fill(host, value)
    for cached in ("bmm1_scale", "bmm2_scale"):  # FlashInfer caches products of the scales
        if getattr(layer.impl, cached, None) is not None:
            setattr(layer.impl, cached, None)


def _loader(layer: torch.nn.Module, role: Role) -> Callable[..., None]:
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
        if scales.values.get(role) != value:
            owner.quant_method.state.guard.outdate_cache(_OLDER_CODES)
        scales.values[role] = value
        if scales.provisional is None:
            _publish(owner, role, value, fill)

    return load_kv_scale

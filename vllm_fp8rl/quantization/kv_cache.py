"""vLLM's method for the KV cache of an attention layer: its scale parameters and its guard.

vLLM's own ``BaseKVCacheMethod`` deletes its scale parameters after the first load, so that later
ones are skipped in silence, and falls back to scale 1.0. Here the parameters stay, only a value
that a loader set counts, and until one has come the engine refuses to run
(:class:`~vllm_fp8rl.engine.guard.RefitGuard`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CompilationConfig, get_current_vllm_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from fp8rl.errors import ScaleError, UnsupportedError
from fp8rl.kv_scales import ROLES
from vllm_fp8rl.engine.guard import PLAIN_KV_DTYPES, guarded
from vllm_fp8rl.engine.rank_state import UNSET, LayerKVScales, RankState
from vllm_fp8rl.kv.scales import publish_scales, scale_loader

FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
"""Values of ``kv_cache_dtype`` that mean E4M3 with one scale a tensor."""
INT8_KV_DTYPE = "int8_per_token_head"
"""INT8 with a scale for each token and head, which the kernel that writes it computes."""

_SERVED = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""Attention backends that read the scales from tensors, or from the layer at each call. With
``exact`` they call its kernels: the first one over an FP8 or BF16 cache, the second one over an
INT8 one, the last one over all three."""
_BAKES_INTO_FULL_GRAPHS = "FLASHINFER"
"""Takes the scales as host numbers."""


def check_kv_cache_dtype(kv_cache_dtype: str) -> bool:
    """Return whether the cache is FP8, with scales that must be set.

    A quantized cache that is neither that nor INT8 by token and head is an UnsupportedError.
    """
    if kv_cache_dtype in (*PLAIN_KV_DTYPES, INT8_KV_DTYPE):
        return False
    if kv_cache_dtype not in FP8_KV_DTYPES:
        raise UnsupportedError(
            f"fp8rl has no KV cache of dtype '{kv_cache_dtype}'; set kv_cache_dtype to 'fp8' "
            f"(E4M3, one scale a tensor), '{INT8_KV_DTYPE}' or 'auto'."
        )
    return True


def check_backend(name: str, compilation: CompilationConfig) -> None:
    """Raise UnsupportedError for an attention backend that would not see new scales."""
    if name in _SERVED:
        return
    if name != _BAKES_INTO_FULL_GRAPHS:
        raise UnsupportedError(
            f"Attention backend '{name}' is not known to read new KV scales; choose one of "
            f"{', '.join(_SERVED)} with attention_backend=..., or set "
            "kv_cache_dtype='auto'."
        )
    if compilation.cudagraph_mode is not None and compilation.cudagraph_mode.has_full_cudagraphs():
        raise UnsupportedError(
            f"Attention backend '{name}' writes KV scales into full CUDA graphs as constants, so "
            "that new ones would have no effect; choose attention_backend='FLASH_ATTN' or "
            "'TRITON_ATTN', or set compilation_config={'cudagraph_mode': 'PIECEWISE'}."
        )


def check_exact_backend(name: str) -> None:
    """Raise UnsupportedError for an attention backend without the kernels of ``exact``."""
    if name not in _SERVED:
        raise UnsupportedError(
            f"Attention backend '{name}' has other kernels than the trainer, and the recipe says "
            f"exact; choose one of {', '.join(_SERVED)} with attention_backend=..., or set exact "
            "to false in the recipe."
        )


class Fp8RLKVCacheMethod(BaseKVCacheMethod):
    """Scale parameters ``q_scale``, ``k_scale``, ``v_scale`` of an ``Attention`` layer.

    vLLM asks for a new method object whenever it post-processes a layer, so what loaders have set
    is kept in the :class:`~vllm_fp8rl.engine.rank_state.RankState`, by the layer's
    name. On a layer whose cache is not FP8 the method only inserts the guard.
    """

    supports_pre_processed_weights = False

    def __init__(self, quant_config: QuantizationConfig, state: RankState) -> None:
        super().__init__(quant_config)
        self.state = state

    def create_weights(self, layer: Any) -> None:
        """Register the parameters, float32 scalars."""
        fp8 = check_kv_cache_dtype(layer.kv_cache_dtype)
        if self.state.recipe.exact:
            check_exact_backend(layer.attn_backend.get_name())
        if fp8:
            engine = get_current_vllm_config()
            check_backend(layer.attn_backend.get_name(), engine.compilation_config)
            scales = LayerKVScales(_layer_number(layer.layer_name))
            self.state.kv_scales[layer.layer_name] = scales
        layer.attn_backend = guarded(layer.attn_backend)
        # A CPU holds rounded values in the model's dtype. MLA has no implementation yet.
        if getattr(getattr(layer, "impl", None), "rounds", None) is not None:
            layer.kv_cache_dtype = "auto"
            layer.kv_cache_torch_dtype = get_current_vllm_config().model_config.dtype
        if not fp8:
            return
        for role in ROLES:
            parameter = torch.nn.Parameter(
                torch.full((), UNSET, dtype=torch.float32), requires_grad=False
            )
            parameter.weight_loader = scale_loader(layer, role)  # type: ignore[attr-defined]
            layer.register_parameter(f"{role}_scale", parameter)
        publish_scales(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the loaded values back wherever vLLM keeps a copy; any number of times.

        ``load_format=dummy`` writes random numbers into parameters and buffers alike, so whatever
        no loader set becomes the placeholder again.
        """
        publish_scales(layer)

    def restore(self, layer: Any) -> None:
        """Write again what a sleep or vLLM's wake-up may have overwritten."""
        publish_scales(layer)
        restore = getattr(layer.impl, "restore", None)  # of our classes for Hopper GPUs
        if restore is not None:
            restore()

    def require_ready(self, layer: Any) -> None:
        """Raise ScaleError, for all layers at once, unless this one has the scales it needs."""
        scales = self.state.kv_scales.get(layer.layer_name)
        if scales is None or scales.provisional is not None or not scales.missing(layer):
            return
        layers = self.state.layers
        lacking = [
            each for name, own in self.state.kv_scales.items() for each in own.missing(layers[name])
        ]
        raise ScaleError(
            f"KV scale '{lacking[0]}' was never loaded ({len(lacking)} missing): the FP8 KV cache "
            "does not start from scale 1.0. Send the scales with a refit, store them in the "
            "checkpoint, call vllm_fp8rl.calibration.calibrate_kv_scales or "
            "vllm_fp8rl.calibration.set_uncalibrated_kv_scales, or set kv_cache_dtype='auto'."
        )


def _layer_number(name: str) -> int:
    """Return the global number of a layer, which the names of its scales on the wire have."""
    number = next((part for part in name.split(".") if part.isdigit()), None)
    if number is None:
        raise UnsupportedError(
            f"Attention layer '{name}' has no number in its name, so KV scales cannot be sent to "
            "it; set kv_cache_dtype='auto'."
        )
    return int(number)

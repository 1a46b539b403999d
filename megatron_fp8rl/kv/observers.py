"""The amax of q, k and v, observed in forwards that run anyway.

NeMo RL calibrates FP8 KV scales with an extra full forward a step and a device synchronisation per
layer and micro-batch. A pre-hook on ``core_attention`` sees the same tensors, after QK norm and
rotary embedding, in any log-probability or training forward, for the price of one read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.kv_scales import ROLES
from fp8rl.training.kv import AmaxTable
from megatron_fp8rl.export import ModelChunks, device_of, unwrap_chunks
from megatron_fp8rl.hf_names import linear_attention_layers


class QKVObserver(AmaxTable):
    """Observe the amax of q, k and v per global decoder layer.

    The device is not synchronised until :meth:`amax` or :meth:`scales` is called, and activations
    that are recomputed do no harm. Padding tokens are observed like any other token, as in NeMo RL;
    they can only raise a scale. Multi-token-prediction layers have no KV scale and are left out.

    Args:
        model_chunks: this rank's GPTModel or virtual-pipeline chunks, plain or wrapped.

    Raises:
        UnsupportedError: multi-latent attention, a layer without ``core_attention``, or chunks
            that hold a layer twice.
    """

    def __init__(self, model_chunks: ModelChunks) -> None:
        chunks = unwrap_chunks(model_chunks)
        attentions = dict(core_attentions(chunks))
        linear = linear_attention_layers(chunks[0].config)
        layers = [number for number, flag in enumerate(linear) if not flag]
        super().__init__(chunks[0].config.num_layers, layers, device_of(chunks))
        # First in line: the trainer's own attention may see k and v after FP8 (kv/cache.py).
        self._handles = [
            module.register_forward_pre_hook(self._hook(layer), prepend=True)
            for layer, module in attentions.items()
        ]

    def _hook(self, layer: int) -> Any:
        def observe(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) < len(ROLES):
                raise UnsupportedError(
                    f"core_attention of layer {layer} was called with {len(args)} positional "
                    "arguments, so q, k and v cannot be observed; this attention is not served."
                )
            self.see(layer, *args[: len(ROLES)])

        return observe


def core_attentions(chunks: list[Any]) -> Iterator[tuple[int, torch.nn.Module]]:
    """Yield the global number and the ``core_attention`` of each decoder layer of this rank.

    Linear attention has no keys and values to cache, and is left out.

    Raises:
        UnsupportedError: multi-latent attention, a layer without ``core_attention``, or one that is
            there twice.
    """
    seen: set[int] = set()
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            number = layer.layer_number - 1
            if number in seen:
                raise UnsupportedError(
                    f"The model chunks hold layer {number} twice; give each chunk of one model "
                    "once, and another model by itself."
                )
            seen.add(number)
            if linear_attention_layers(chunk.config)[number]:
                continue
            attention = getattr(layer, "self_attention", None)
            if chunk.config.multi_latent_attention:
                raise UnsupportedError(
                    f"Layer {number} has multi-latent attention, whose cache holds latents and not "
                    "k and v; use kv_cache.dtype 'auto' for this model."
                )
            core = getattr(attention, "core_attention", None)
            if core is None:
                raise UnsupportedError(
                    f"Layer {number} has no core_attention ({type(attention).__name__}), so its "
                    "q, k and v cannot be observed; use kv_cache.dtype 'auto' for this model."
                )
            yield number, core

"""The amax of q, k and v, observed in forwards that run anyway.

NeMo RL calibrates FP8 KV scales with an extra full forward a step and a device synchronisation per
layer and micro-batch. A pre-hook on ``core_attention`` sees the same tensors, after QK norm and
rotary embedding, in any log-probability or training forward, for the price of one read.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8rl.errors import CheckpointError, UnsupportedError
from fp8rl.kv_scales import ROLES, scales_from_amax
from fp8rl.numerics import amax_into
from megatron_fp8rl.export import ModelChunks, device_of, unwrap_chunks
from megatron_fp8rl.hf_names import linear_attention_layers

_KEY = "amax"
"""Name of the table in a checkpoint."""


class QKVObserver:
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
        config = chunks[0].config
        self.num_layers: int = config.num_layers
        linear = linear_attention_layers(config)
        self.layers = [number for number, flag in enumerate(linear) if not flag]
        """Global numbers of the layers with keys and values, on all ranks."""
        self._amax = torch.zeros(self.num_layers, len(ROLES), device=device_of(chunks))
        self._of_layers = self._amax.unbind()
        # First in line: the trainer's own attention may see k and v after FP8 (kv/cache.py).
        self._handles = [
            module.register_forward_pre_hook(self._hook(layer), prepend=True)
            for layer, module in attentions.items()
        ]

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
        """Return KV-cache scales by name, the same on every rank; a collective like :meth:`amax`.

        Args:
            margin: headroom, at least 1; see :func:`fp8rl.kv_scales.scales_from_amax`.

        Returns:
            name -> float32 ``[1]`` on the CPU, as :func:`fp8rl.kv_scales.scales_from_amax`.

        Raises:
            ScaleError: on every rank, if a layer saw no token, or a NaN or infinite activation.
        """
        return scales_from_amax(self.amax(group), margin, self.layers)

    def reset(self) -> None:
        """Forget what was seen, e.g. after an optimizer step has changed the activations."""
        self._amax.zero_()

    def close(self) -> None:
        """Remove the hooks; what was seen stays readable."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

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

    def _hook(self, layer: int) -> Any:
        def observe(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if len(args) < len(ROLES):
                raise UnsupportedError(
                    f"core_attention of layer {layer} was called with {len(args)} positional "
                    "arguments, so q, k and v cannot be observed; this attention is not served."
                )
            amax_into(self._of_layers[layer], args[: len(ROLES)])

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

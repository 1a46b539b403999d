"""Weights that vLLM packs on a CPU without asking a quantization method: kept open for refits.

See :mod:`vllm_fp8rl.patches.ledger`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fp8rl.errors import RefitError
from fp8rl.models.families import kind_of
from vllm_fp8rl.engine.names import uses_fp8rl
from vllm_fp8rl.engine.rank_state import RankState

_PLAIN = "_cpu_unpacked_conv_weight"
"""Where vLLM keeps the weight of a packed convolution, ``[rows, width]``."""


def keep_unpacked(process: Callable[..., None]) -> Callable[..., None]:
    """Replace ``process_weights_after_loading`` of a vLLM method by one that packs nothing.

    Only matrices of an engine of fp8rl on a CPU are kept; a packed convolution is one that vLLM's
    kernel needs. An embedding that serves as output projection too is one: vLLM would multiply with
    a packed copy of it, which no refit reaches.
    """

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if layer.weight.ndim == 2 and _on_a_cpu_of_ours():
            layer.cpu_linear = torch.nn.functional.linear
        else:
            process(self, layer)

    return process_weights_after_loading


def _on_a_cpu_of_ours() -> bool:
    from vllm.config import get_current_vllm_config_or_none  # imported where an engine is built

    engine = get_current_vllm_config_or_none()
    return uses_fp8rl(engine) and engine.device_config.device_type == "cpu"


def keep_refittable(state: RankState) -> None:
    """Let loads reach the convolutions of a built model, which have a method of vLLM's.

    vLLM's kernel reads the packed weight, so every load packs it again.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    for layer in list(state.layers.values()):
        for linear in layer.modules():
            method = getattr(linear, "quant_method", None)
            if not isinstance(linear, LinearBase) or type(method) is not UnquantizedLinearMethod:
                continue
            if kind_of(linear.prefix) == "conv1d":
                _load_packed(linear)


def _load_packed(conv: Any) -> None:
    """Let a convolution's loader write its weight wherever vLLM has it, in HF's order."""
    from vllm import _custom_ops

    weight = conv.weight
    own_loader: Callable[..., None] = weight.weight_loader
    reference = weakref.ref(conv)  # a loader must not keep the model alive

    def load(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        owner = reference()
        if owner is None:
            raise RefitError("A weight was loaded into a layer that no longer exists; restart.")
        plain = getattr(owner, _PLAIN, None)
        if plain is None:  # not packed yet, or not at all
            own_loader(param, loaded_weight)
            return
        # In the shape that the loader knows: before 0.32 it copies without reshaping.
        own_loader(plain.unsqueeze(1), loaded_weight)
        param.data.copy_(_custom_ops.causal_conv1d_weight_pack(plain))

    load.packs_again = True  # type: ignore[attr-defined]  # refit/receiver/derived.py looks for it
    weight.weight_loader = load

"""The convolutions of gated delta nets, whose weight vLLM packs on a CPU: kept open for refits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from vllm import _custom_ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from fp8rl.errors import RefitError
from fp8rl.models.families import kind_of
from vllm_fp8rl.engine.rank_state import RankState

Loader = Callable[[torch.Tensor, torch.Tensor], None]

_PLAIN = "_cpu_unpacked_conv_weight"
"""Where vLLM keeps the weight of a packed convolution, ``[rows, width]``."""


def keep_refittable(state: RankState) -> None:
    """Let loads reach the convolutions of a built model, which have a method of vLLM's.

    vLLM's kernel reads the packed weight, so every load packs it again.
    """
    for layer in list(state.layers.values()):
        for linear in layer.modules():
            method = getattr(linear, "quant_method", None)
            if not isinstance(linear, LinearBase) or type(method) is not UnquantizedLinearMethod:
                continue
            if kind_of(linear.prefix) == "conv1d":
                _load_packed(linear)


def _load_packed(conv: Any) -> None:
    """Let a convolution's loader write its weight wherever vLLM has it, in HF's order."""
    weight = conv.weight
    own_loader: Loader = weight.weight_loader
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

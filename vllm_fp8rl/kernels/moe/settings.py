"""Settings of the process that vLLM's fused MoE kernels read. Importing this imports no engine."""

from __future__ import annotations

import os
from pathlib import Path

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Recipe

ACTIVATION_SCALES_ENV = "VLLM_USE_DEEP_GEMM_E8M0"
"""Whether all of vLLM's MoE kernels quantize activations with scales that are powers of two. vLLM's
default is ``1``, on Hopper too."""
TILES_ENV = "VLLM_TUNED_CONFIG_FOLDER"
"""Folder in which vLLM looks for the tiles of its Triton kernel for experts before its own."""
TILES = Path(__file__).with_name("expert_tiles")
"""Tiles in vLLM's format (docs/measurements/experts.md): a file for each number of experts, their
width and GPU. Where there is none, vLLM takes its own file, or guesses."""


def set_activation_scales(recipe: Recipe, *, experts: bool) -> None:
    """Make vLLM's experts quantize activations as the recipe says.

    vLLM reads the format from the environment only, once, at the first FP8 kernel of a process
    (``is_deep_gemm_e8m0_used`` in ``vllm/utils/deep_gemm.py``, 0.25.1). Call this before, for an
    engine without experts too: another one with experts may follow. Linear layers take the format
    as an argument.

    Raises:
        UnsupportedError: the model has experts and the environment contradicts the recipe.
    """
    wanted = "1" if recipe.activations.scale_format == "pow2" else "0"
    found = os.environ.setdefault(ACTIVATION_SCALES_ENV, wanted)
    if experts and found != wanted:
        raise UnsupportedError(
            f"{ACTIVATION_SCALES_ENV}={found} contradicts the recipe, whose activations have "
            f"{recipe.activations.scale_format} scales; unset it, or, if another engine of this "
            "process has set it, start this one in a process of its own."
        )


def offer_expert_tiles() -> None:
    """Let vLLM find :data:`TILES`, unless the environment names another folder.

    Call it before the first FP8 kernel of an engine with experts and without adapters: with a
    folder vLLM also looks there for settings of its LoRA kernels, and a later engine of the process
    with adapters warns that it found none. vLLM keeps its settings from the first engine of a
    process on, so tiles are not found by one that follows an engine without experts.
    """
    os.environ.setdefault(TILES_ENV, str(TILES))

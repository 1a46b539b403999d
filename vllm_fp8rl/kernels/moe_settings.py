"""Process-wide settings that vLLM's fused MoE kernels read. Importing this imports no engine."""

from __future__ import annotations

import os

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import Recipe

ACTIVATION_SCALES_ENV = "VLLM_USE_DEEP_GEMM_E8M0"
"""Whether vLLM's experts, Triton's too, quantize activations with scales that are powers of two;
``1`` unless it is set, also on Hopper."""


def set_activation_scales(recipe: Recipe, *, experts: bool) -> None:
    """Have vLLM's experts quantize activations as the recipe says.

    vLLM takes the format from the environment alone, at the first FP8 kernel of a process
    (``is_deep_gemm_e8m0_used`` in ``vllm/utils/deep_gemm.py``, 0.25.1), so this comes before, and
    with the first engine that has no experts too. Linear layers are told directly.

    Args:
        recipe: of an engine on a GPU.
        experts: it has some.

    Raises:
        UnsupportedError: it has, and the environment says otherwise.
    """
    wanted = "1" if recipe.activations.scale_format == "pow2" else "0"
    found = os.environ.setdefault(ACTIVATION_SCALES_ENV, wanted)
    if experts and found != wanted:
        raise UnsupportedError(
            f"{ACTIVATION_SCALES_ENV}={found} contradicts the recipe, whose activations have "
            f"{recipe.activations.scale_format} scales; unset it, or, if another engine of this "
            "process has set it, start this one in a process of its own."
        )

"""KV-cache scales: the one formula from amax to scale, and the scales' names in a refit stream.

A scale multiplies FP8 codes back (``k = codes * k_scale``), as in vLLM. The names are those that
NeMo RL sends: ``model.layers.N.self_attn.k_scale``, ``.v_scale`` and ``.attn.q_scale``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

import torch

from fp8rl.errors import ScaleError
from fp8rl.numerics import E4M3_MAX

Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")
_LARGEST = 2.0**50
"""Upper bound of a scale; its inverse is the lower bound. With codes from 2**-9 to 448, a product
of two dequantized values, summed over a head size of 1024, is then a normal number of float32 and
BF16, and so is the inverse that kernels multiply with. No model comes near the bounds."""
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.)?([qkv])_scale")


def scale_name(layer: int, role: Role) -> str:
    """The name of one scale on the wire, for a global layer number."""
    middle = "attn." if role == "q" else ""
    return f"model.layers.{layer}.self_attn.{middle}{role}_scale"


def parse_scale_name(name: str) -> tuple[int, Role] | None:
    """``(layer, role)`` of a scale's name, in both forms of NeMo RL; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), match.group(2)) if match else None  # type: ignore[return-value]


def scale_names(num_layers: int, roles: Iterable[Role] = ROLES) -> list[str]:
    """The names of all scales of a model, layer by layer."""
    return [scale_name(layer, role) for layer in range(num_layers) for role in roles]


def scales_from_amax(amax: torch.Tensor, margin: float) -> dict[str, torch.Tensor]:
    """Scales of every layer, ``amax * margin / 448``.

    Args:
        amax: ``[num_layers, 3]``, the observers' amax of q, k and v for each global layer; a
            percentile may stand in for the amax. A float64 tensor is multiplied in float64 and
            rounded once, any other is multiplied in float32.
        margin: headroom factor, at least 1.

    Returns:
        name -> float32 ``[1]`` on the CPU.

    Raises:
        ScaleError: wrong shape; or an amax is 0 (the layer saw no token), negative, NaN, infinite,
            or out of all proportion.
    """
    if amax.ndim != 2 or amax.shape[1] != len(ROLES):
        raise ScaleError(f"amax must have shape [num_layers, 3], not {tuple(amax.shape)}.")
    wide = amax.detach().to(torch.promote_types(amax.dtype, torch.float32))
    table = (wide * (margin / E4M3_MAX)).float().cpu()  # the one device-to-host copy
    scales = {
        scale_name(layer, role): table[layer, column].reshape(1)
        for layer in range(table.shape[0])
        for column, role in enumerate(ROLES)
    }
    for name, scale in scales.items():
        check_scale(name, scale)
    return scales


def check_scale(name: str, scale: torch.Tensor | float) -> float:
    """Check a scale and return it as a float.

    Raises:
        ScaleError: the scale is not one floating-point value, or it is 0, negative, NaN, infinite,
            or so small or large that attention would compute with zeros or infinities.
    """
    if isinstance(scale, torch.Tensor):
        if not scale.is_floating_point():
            raise ScaleError(f"KV scale '{name}' came in {scale.dtype}; send it in float32.")
        if scale.numel() != 1:
            raise ScaleError(
                f"KV scale '{name}' has shape {tuple(scale.shape)}; send one value per tensor."
            )
        scale = float(scale.float().item())
    if not math.isfinite(scale) or scale <= 0.0:
        raise ScaleError(
            f"KV scale '{name}' is {scale}; it must be positive and finite. Calibrate on at least "
            "one batch of real tokens before the refit."
        )
    if not 1 / _LARGEST <= scale <= _LARGEST:
        raise ScaleError(
            f"KV scale '{name}' is {scale:g}, outside {1 / _LARGEST:.1e} to {_LARGEST:.1e}, where "
            "attention would compute with zeros or infinities; calibrate anew, and look at the "
            "weights of that layer."
        )
    return scale

"""KV-cache scales: from amax to the named tensors at the end of a refit stream.

A scale multiplies FP8 codes back (``k = codes * k_scale``), as in vLLM. Names are those that NeMo
RL sends: ``model.layers.N.self_attn.k_scale``, ``.v_scale`` and ``.attn.q_scale``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from fp8rl.errors import ScaleError
from fp8rl.numerics import E4M3_MAX

Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")
_LARGEST = 2.0**50
"""Bound of a scale, and its inverse is the other. With codes up to 448 and down to 2**-9, a product
of two dequantized values, summed over 1024 of a head, is then a normal number of float32 and BF16,
and so is the inverse that kernels multiply with. No model comes near: keys of 1e-12 or 1e17."""
_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.)?([qkv])_scale")


def scale_name(layer: int, role: Role) -> str:
    """Name of one scale on the wire, for a global layer number."""
    middle = "attn." if role == "q" else ""
    return f"model.layers.{layer}.self_attn.{middle}{role}_scale"


def parse_scale_name(name: str) -> tuple[int, Role] | None:
    """(layer, role) of a scale's name, in both forms that NeMo RL sends; None for other names."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), match.group(2)) if match else None  # type: ignore[return-value]


def scale_names(num_layers: int, roles: Iterable[Role] = ROLES) -> list[str]:
    """All names for a model, layer by layer."""
    return [scale_name(layer, role) for layer in range(num_layers) for role in roles]


def scales_from_amax(amax: torch.Tensor, margin: float) -> dict[str, torch.Tensor]:
    """Scales of every layer from the observers' table.

    Args:
        amax: float32 ``[num_layers, 3]``, largest magnitude of q, k and v per global layer.
        margin: headroom factor, at least 1; ``scale = amax * margin / 448``.

    Returns:
        name -> float32 ``[1]`` on the CPU.

    Raises:
        ScaleError: an amax is 0 (the layer saw no token), negative, NaN, infinite, or no size that
            a key or value has.
    """
    if amax.ndim != 2 or amax.shape[1] != len(ROLES):
        raise ScaleError(f"amax must have shape [num_layers, 3], not {tuple(amax.shape)}.")
    table = (amax.detach().float() * (margin / E4M3_MAX)).cpu()  # the one device-to-host copy
    scales = {
        scale_name(layer, role): table[layer, column].reshape(1)
        for layer in range(table.shape[0])
        for column, role in enumerate(ROLES)
    }
    for name, scale in scales.items():
        check_scale(name, scale)
    return scales


def check_scale(name: str, scale: torch.Tensor | float) -> float:
    """The scale as a float.

    Raises:
        ScaleError: not one element, no float tensor, 0, negative, NaN, infinite, or so small or
            large that attention would compute with zeros or infinities.
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


def check_complete(
    scales: Mapping[str, torch.Tensor | float], num_layers: int, roles: Iterable[Role] = ("k", "v")
) -> None:
    """Raise unless ``scales`` has a valid value for every layer and role, and nothing else.

    Raises:
        ScaleError: a missing, unknown, doubled or invalid scale.
    """
    required = set(scale_names(num_layers, roles))
    allowed = set(scale_names(num_layers))
    canonical: dict[str, torch.Tensor | float] = {}
    for name, scale in scales.items():
        parsed = parse_scale_name(name)
        if parsed is None or scale_name(*parsed) not in allowed:
            raise ScaleError(f"'{name}' is no KV scale of a model with {num_layers} layers.")
        if scale_name(*parsed) in canonical:
            raise ScaleError(f"KV scale '{name}' came twice, under two spellings; send it once.")
        canonical[scale_name(*parsed)] = scale
    missing = sorted(required - set(canonical))
    if missing:
        raise ScaleError(
            f"{len(missing)} KV scales are missing, the first is '{missing[0]}'; run the observers "
            "over every layer before the refit."
        )
    for name, scale in canonical.items():
        check_scale(name, scale)


def merge_amax(tables: Iterable[torch.Tensor]) -> torch.Tensor:
    """Elementwise maximum of amax tables, e.g. of several ranks or steps; NaN is kept.

    Raises:
        ScaleError: no table, or tables of different shapes.
    """
    merged: torch.Tensor | None = None
    for table in tables:
        if merged is not None and merged.shape != table.shape:
            raise ScaleError(
                f"Cannot merge amax tables of shapes {tuple(merged.shape)} and "
                f"{tuple(table.shape)}; they must come from one model."
            )
        merged = table.clone() if merged is None else torch.maximum(merged, table)
    if merged is None:
        raise ScaleError("Cannot merge amax tables: none was given.")
    return merged

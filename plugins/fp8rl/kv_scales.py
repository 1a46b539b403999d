"""KV-cache scales: the one formula from amax to scale, and the scales' names in a refit stream.

A scale multiplies FP8 codes back (``k = codes * k_scale``), as in vLLM. The names are those that
NeMo RL sends: ``model.layers.N.self_attn.k_scale``, ``.v_scale`` and ``.attn.q_scale``.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Literal, NamedTuple

import torch

from fp8rl.errors import ScaleError
from fp8rl.numerics import E4M3_MAX
from fp8rl.recipe import KVCache

logger = logging.getLogger(__name__)

Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")
_LARGEST = 2.0**50
"""Upper bound of a scale; its inverse is the lower bound. With codes from 2**-9 to 448, a product
of two dequantized values, summed over a head size of 1024, is then a normal number of float32 and
BF16, and so is the inverse that kernels multiply with. No model comes near the bounds."""
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.self_attn\.(?:attn\.)?([qkv])_scale")


def scale_name(layer: int, role: Role) -> str:
    """Return the name of one scale on the wire, for a global layer number."""
    middle = "attn." if role == "q" else ""
    return f"model.layers.{layer}.self_attn.{middle}{role}_scale"


def parse_scale_name(name: str, prefix: str = "model.") -> tuple[int, Role] | None:
    """Return ``(layer, role)`` of a scale's name, in both forms of NeMo RL; None for others.

    ``prefix`` is what precedes ``layers``; another one than the wire's inside a multimodal model.
    """
    match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    return (int(match.group(1)), match.group(2)) if match else None  # type: ignore[return-value]


def require_one_name(places: Iterable[tuple[str, tuple[int, Role]]]) -> dict[tuple[int, Role], str]:
    """Return the names of scales by what :func:`parse_scale_name` found in each.

    Raises:
        ScaleError: two names are those of one scale, such as ``k_scale`` and ``attn.k_scale``.
    """
    names: dict[tuple[int, Role], str] = {}
    for name, place in places:
        if names.setdefault(place, name) != name:
            raise ScaleError(
                f"'{names[place]}' and '{name}' are both the {place[1]} scale of layer {place[0]}; "
                "keep one of them."
            )
    return names


def scale_names(num_layers: int, roles: Iterable[Role] = ROLES) -> list[str]:
    """Return the names of all scales of a model, layer by layer."""
    return [scale_name(layer, role) for layer in range(num_layers) for role in roles]


def scales_from_amax(
    amax: torch.Tensor, margin: float, layers: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """Scales of every layer: the smallest powers of two at or above ``amax * margin / 448``.

    With a power of two every dequantized value is exact in BF16, so that a trainer can attend over
    the very keys and values of the rollout. It costs no precision: E4M3 is a floating format.

    Args:
        amax: ``[num_layers, 3]``, the observers' amax of q, k and v for each global layer.
        margin: headroom factor, at least 1.
        layers: global numbers of the layers with keys and values; None: all of them.

    Returns:
        name -> float32 ``[1]`` on the CPU.

    Raises:
        ScaleError: wrong shape; or an amax is 0 (the layer saw no token), negative, NaN, infinite,
            or out of all proportion.
    """
    if amax.ndim != 2 or amax.shape[1] != len(ROLES):
        raise ScaleError(f"amax must have shape [num_layers, 3], not {tuple(amax.shape)}.")
    least = amax.detach().cpu().double() * (margin / E4M3_MAX)  # the one device-to-host copy
    table = _power_of_two_above(least).float()
    scales = {
        scale_name(layer, role): table[layer, column].reshape(1)
        for layer in (range(table.shape[0]) if layers is None else layers)
        for column, role in enumerate(ROLES)
    }
    for name, scale in scales.items():
        check_scale(name, scale)
    return scales


def power_of_two_scales(scales: Mapping[str, float]) -> dict[str, float]:
    """Round scales of others up to powers of two, for the reason of :func:`scales_from_amax`."""
    values = [check_scale(name, scale) for name, scale in scales.items()]
    rounded = _power_of_two_above(torch.tensor(values, dtype=torch.float64)).tolist()
    return dict(zip(scales, rounded, strict=True))


def _power_of_two_above(least: torch.Tensor) -> torch.Tensor:
    """Return the least powers of two at or above float64 values; 0, negative, infinite stay."""
    mantissa, exponent = torch.frexp(least)  # 0.5 <= mantissa < 1
    rounded = torch.ldexp(torch.ones_like(least), exponent - (mantissa == 0.5).int())
    return torch.where(torch.isfinite(least) & (least > 0), rounded, least)


class NextScales(NamedTuple):
    """Scales for the next refit, and how the latest batch fitted those in service."""

    scales: dict[str, torch.Tensor]
    """Name -> float32 ``[1]`` on the CPU."""
    outgrown: tuple[str, ...]
    """Names whose amax lies beyond the scale in service. With ``grow`` their scales have grown,
    with ``start`` values are being clipped."""


def next_scales(
    current: Mapping[str, torch.Tensor | float],
    amax: torch.Tensor,
    kv_cache: KVCache,
    layers: Sequence[int] | None = None,
) -> NextScales:
    """Compute the scales for the next refit by the recipe's ``kv_cache.recalibrate``.

    ``refit`` gives :func:`scales_from_amax` each time. ``grow`` and ``start`` keep a scale that is
    in service, so that codes in the KV cache stay right. With ``grow`` a scale whose amax lies
    beyond it (``amax > 448 * scale``) becomes that of the formula, a larger power of two; with
    ``start`` the log warns of it. All ranks that pass equal arguments get equal scales.

    Args:
        current: scales in service, by name; empty before the first calibration.
        amax: see :func:`scales_from_amax`.
        kv_cache: section of the recipe.
        layers: see :func:`scales_from_amax`.

    Raises:
        ScaleError: see :func:`scales_from_amax`; or a bad scale in service.
    """
    fresh = scales_from_amax(amax, kv_cache.margin, layers)
    rows = amax if layers is None else amax[list(layers)]
    seen = dict(zip(fresh, rows.detach().double().flatten().tolist(), strict=True))
    held = {name: check_scale(name, current[name]) for name in fresh if name in current}
    outgrown = tuple(name for name in held if seen[name] > E4M3_MAX * held[name])
    if kv_cache.recalibrate == "refit":
        return NextScales(fresh, outgrown)
    if outgrown and kv_cache.recalibrate == "start":
        worst = max(outgrown, key=lambda name: seen[name] / held[name])
        logger.warning(
            "fp8rl: %d KV scales clip; for '%s' the amax is %.3g, but its codes end at %.3g. Raise "
            "kv_cache.margin, or set kv_cache.recalibrate to grow.",
            len(outgrown),
            worst,
            seen[worst],
            E4M3_MAX * held[worst],
        )
    kept = set(held) - (set(outgrown) if kv_cache.recalibrate == "grow" else set())
    scales = {
        name: torch.tensor([held[name]]) if name in kept else scale for name, scale in fresh.items()
    }
    return NextScales(scales, outgrown)


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
    elif isinstance(scale, bool) or not isinstance(scale, Real):
        raise ScaleError(f"KV scale '{name}' is a {type(scale).__name__}; send a number.")
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

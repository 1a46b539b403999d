"""The one error metric of the project's tests, and equality of codes."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; NaN or another shape never passes."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    assert torch.isfinite(actual.float()).all(), "result is not finite"
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-300)).item()


def same_codes(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    """Whether codes, to the bit, and scales are equal."""
    codes = (pair[0].view(torch.uint8) for pair in (one, other))
    return torch.equal(*codes) and torch.equal(one[1], other[1])

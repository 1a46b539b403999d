"""The one error metric of the project's tests."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; NaN or another shape never passes."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    assert torch.isfinite(actual.float()).all(), "result is not finite"
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-300)).item()

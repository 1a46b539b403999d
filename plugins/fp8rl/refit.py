"""`RefitReport`: what one weight transfer from trainer to rollout engine did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RefitReport:
    """Outcome of a complete refit; an incomplete one raises instead.

    Units: seconds, bytes.
    """

    parameters: int
    """Engine parameters that received their tensors."""
    kv_scales: int
    tensors: int
    """Tensors on the wire."""
    received_bytes: int
    seconds: float

"""Frequencies of a rotary embedding, and the table of their cosines and sines, for both engines."""

from __future__ import annotations

import math

import torch

LLAMA3 = (1, 4, 8192)
"""``low_freq_factor``, ``high_freq_factor`` and ``original_max_position_embeddings`` of Llama 3.1
to 3.3, which Megatron-Core has no arguments for."""


def inverse_frequencies(base: float, dim: int, factor: float | None = None) -> torch.Tensor:
    """Return the frequencies of the rotated pairs of a head.

    Args:
        base: ``rope_theta`` of the model.
        dim: rotated numbers of a head.
        factor: ``factor`` of a ``rope_type`` of ``llama3``, whose other numbers are
            :data:`LLAMA3`; None scales nothing.

    Returns:
        float64 ``[dim / 2]`` on the CPU.
    """
    plain = base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if factor is None:
        return plain
    low, high, length = LLAMA3
    kept = ((length * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def cos_sin_table(inverse: torch.Tensor, length: int, device: torch.device) -> torch.Tensor:
    """Make the cosines and sines of all positions.

    In float64 on the CPU, rounded once: a GPU's functions have other last bits.

    Args:
        inverse: :func:`inverse_frequencies` of the model.
        length: number of positions.
        device: where the table goes.

    Returns:
        float32 ``[length, dim]``: ``dim / 2`` cosines, then as many sines.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), inverse)
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)

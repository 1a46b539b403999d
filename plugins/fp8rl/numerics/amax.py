"""Largest magnitudes of tensors, gathered on their device over many calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.dispatch import _implementation
from fp8rl.numerics.formats import AMAX_BINS


def amax_into(slots: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raise each slot to the largest magnitude of its tensor, if that is larger.

    On a GPU one launch serves three tensors; it waits for nothing, allocates nothing and can be
    captured in a CUDA graph. Views whose rows are equally far apart are read where they are.

    Args:
        slots: float32 ``[len(tensors)]``, contiguous, no negative numbers; NaN stays NaN, and is
            what a tensor with a NaN gives.
        tensors: floating point, any shapes and strides; one without elements changes nothing.

    Raises:
        UnsupportedError: slots of another dtype, shape or stride.
    """
    if slots.dtype != torch.float32 or slots.shape != (len(tensors),) or not slots.is_contiguous():
        raise UnsupportedError(
            f"The magnitudes of {len(tensors)} tensors need contiguous float32 slots of shape "
            f"({len(tensors)},), not {slots.dtype} of {tuple(slots.shape)}."
        )
    _implementation(slots, "amax").amax_into(slots, tensors)


def count_amax(counts: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Count the largest magnitude of each row of the last dimension in a histogram a tensor.

    Bins are intervals of float32 between numbers of five mantissa bits, 32 to an octave, from
    2**-32 to 2**32; what is smaller or larger is counted in the outermost, what is not finite in
    one more. :func:`amax_edges` says where they end.

    Args:
        counts: int64 ``[len(tensors), AMAX_BINS + 1]``, contiguous; added to.
        tensors: as for :func:`amax_into`, with at least one dimension.

    Raises:
        UnsupportedError: counts of another dtype, shape or stride.
    """
    expected = (len(tensors), AMAX_BINS + 1)
    if counts.dtype != torch.int64 or counts.shape != expected or not counts.is_contiguous():
        raise UnsupportedError(
            f"Histograms of {len(tensors)} tensors must be contiguous int64 of shape {expected}, "
            f"not {counts.dtype} of {tuple(counts.shape)}."
        )
    _implementation(counts, "amax").count_amax(counts, tensors)

"""Amaxes of tensors, gathered on their device over many calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.dispatch import implementation
from fp8rl.numerics.formats import AMAX_BINS


def amax_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raise each element of ``out`` to the amax of its tensor, if that is larger.

    On a GPU one launch serves three tensors; it does not synchronize, does not allocate and can be
    captured in a CUDA graph. Views whose rows are equally far apart are read in place.

    Args:
        out: float32 ``[len(tensors)]``, contiguous, without negative numbers. A tensor with a NaN
            gives NaN, and NaN stays NaN.
        tensors: floating point, any shapes and strides; an empty tensor changes nothing.

    Raises:
        UnsupportedError: ``out`` has another dtype, shape or stride.
    """
    if out.dtype != torch.float32 or out.shape != (len(tensors),) or not out.is_contiguous():
        raise UnsupportedError(
            f"The amaxes of {len(tensors)} tensors need a contiguous float32 output of shape "
            f"({len(tensors)},), not {out.dtype} of {tuple(out.shape)}."
        )
    implementation(out, "amax").amax_into(out, tensors)


def count_amax(counts: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Count the amax of each row (last dimension) of each tensor in a histogram.

    Bins are intervals of float32 between numbers with five mantissa bits, 32 to an octave, from
    2**-32 to 2**32. Smaller and larger amaxes are counted in the outermost bins, and those that are
    not finite in one bin more. :func:`amax_edges` gives the upper ends of bins.

    Args:
        counts: int64 ``[len(tensors), AMAX_BINS + 1]``, contiguous; the counts are added to it.
        tensors: as for :func:`amax_into`, with at least one dimension.

    Raises:
        UnsupportedError: ``counts`` has another dtype, shape or stride.
    """
    expected = (len(tensors), AMAX_BINS + 1)
    if counts.dtype != torch.int64 or counts.shape != expected or not counts.is_contiguous():
        raise UnsupportedError(
            f"The histograms of {len(tensors)} tensors must be contiguous int64 of shape "
            f"{expected}, not {counts.dtype} of {tuple(counts.shape)}."
        )
    implementation(counts, "amax").count_amax(counts, tensors)

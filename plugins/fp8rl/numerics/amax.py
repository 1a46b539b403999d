"""Amaxes of tensors, gathered on their device over many calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.dispatch import implementation


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

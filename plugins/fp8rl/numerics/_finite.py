"""Whether tensors are finite, without temporaries of their size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.numerics._dispatch import _implementation
from fp8rl.numerics._format import FP8_DTYPE, SOURCE_DTYPES

_SCAN_ELEMENTS = 1 << 18
_TOGETHER = (*SOURCE_DTYPES, FP8_DTYPE)


def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor has no NaN and no infinity.

    Contiguous tensors on a GPU are read by one kernel launch and cost one wait in all; others are
    read in parts.

    Args:
        tensors: any shapes; bfloat16, float16, float32 or float8_e4m3fn; any devices.
    """
    answers = [True] * len(tensors)
    together: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.is_cuda and tensor.is_contiguous() and tensor.dtype in _TOGETHER:
            together.setdefault(tensor.device, []).append(number)
        else:
            answers[number] = _finite_in_parts(tensor)
    for numbers in together.values():
        chosen = [tensors[number] for number in numbers]
        found = _implementation(chosen[0], "triton_many").all_finite(chosen)
        for number, good in zip(numbers, found, strict=True):
            answers[number] = good
    return answers


def _finite_in_parts(tensor: torch.Tensor) -> bool:
    for part in parts(tensor):
        if tensor.dtype == FP8_DTYPE:
            bad = (part.view(torch.uint8) & 0x7F) == 0x7F
        else:
            bad = ~torch.isfinite(part)
        if bool(bad.any()):
            return False
    return True


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Slices along the first dimension of about ``_SCAN_ELEMENTS`` elements."""
    if tensor.ndim == 0:
        return (tensor,)
    row = max(1, tensor.numel() // max(1, tensor.shape[0]))
    return tensor.split(max(1, _SCAN_ELEMENTS // row))

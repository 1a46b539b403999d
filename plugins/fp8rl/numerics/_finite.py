"""Whether tensors are finite, without temporaries of their size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8rl.numerics._dispatch import _implementation
from fp8rl.numerics._format import FP8_DTYPE, SOURCE_DTYPES

_SCAN_ELEMENTS = 1 << 18
_TOGETHER = (*SOURCE_DTYPES, FP8_DTYPE)


def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each tensor has no NaN and no infinity; see :func:`start_finite_check`."""
    return start_finite_check(tensors)()


def start_finite_check(tensors: Sequence[torch.Tensor]) -> Callable[[], list[bool]]:
    """Begin to look for NaN and infinities; what is returned waits and says which are finite.

    Contiguous tensors on a GPU are read by one kernel launch a dtype, which is on its way when this
    returns; others are read in parts, by the second call.

    Args:
        tensors: any shapes; bfloat16, float16, float32 or float8_e4m3fn; any devices.
    """
    together: dict[torch.device, list[int]] = {}
    apart: dict[int, torch.Tensor] = {}
    for number, tensor in enumerate(tensors):
        if tensor.is_cuda and tensor.is_contiguous() and tensor.dtype in _TOGETHER:
            together.setdefault(tensor.device, []).append(number)
        else:
            apart[number] = tensor
    started = []
    for numbers in together.values():
        chosen = [tensors[number] for number in numbers]
        kernels = _implementation(chosen[0], "triton_many")
        started.append((numbers, kernels.start_finite_check(chosen)))
    count = len(tensors)

    def answers() -> list[bool]:  # keeps no tensor that a GPU reads
        found = dict.fromkeys(range(count), True)
        found |= {number: _finite_in_parts(tensor) for number, tensor in apart.items()}
        for numbers, wait in started:
            found.update(zip(numbers, wait(), strict=True))
        return list(found.values())

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

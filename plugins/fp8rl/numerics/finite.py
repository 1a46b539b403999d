"""Check that tensors are finite, without temporaries of their size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from fp8rl.numerics.dispatch import implementation
from fp8rl.numerics.formats import FP8_DTYPE, SOURCE_DTYPES

_SCAN_ELEMENTS = 1 << 18
_KERNEL_DTYPES = (*SOURCE_DTYPES, FP8_DTYPE)


def all_finite(tensors: Sequence[torch.Tensor], limit: float = math.inf) -> list[bool]:
    """Whether each tensor has no NaN and no infinity; see :func:`start_finite_check`."""
    return start_finite_check(tensors, limit)()


def start_finite_check(
    tensors: Sequence[torch.Tensor], limit: float = math.inf
) -> Callable[[], list[bool]]:
    """Start to look for NaN and infinities.

    Contiguous tensors on a GPU are read by one kernel launch a dtype, which has been queued when
    this function returns; other tensors are read in parts when the result is asked for.

    Args:
        tensors: any shapes; bfloat16, float16, float32 or float8_e4m3fn; any devices.
        limit: largest magnitude that counts as finite, such as that of the dtype to convert to. It
            does not apply to float8_e4m3fn.

    Returns:
        A function that waits and returns, for each tensor, whether it is finite.
    """
    on_gpu: dict[torch.device, list[int]] = {}
    others: dict[int, torch.Tensor] = {}
    for number, tensor in enumerate(tensors):
        if tensor.is_cuda and tensor.is_contiguous() and tensor.dtype in _KERNEL_DTYPES:
            on_gpu.setdefault(tensor.device, []).append(number)
        else:
            others[number] = tensor
    started = []
    for numbers in on_gpu.values():
        chosen = [tensors[number] for number in numbers]
        kernels = implementation(chosen[0], "multi_tensor")
        started.append((numbers, kernels.start_finite_check(chosen, limit)))
    count = len(tensors)

    def answers() -> list[bool]:  # holds no reference to the tensors that a GPU reads
        found = dict.fromkeys(range(count), True)
        found |= {number: _finite_in_parts(tensor, limit) for number, tensor in others.items()}
        for numbers, wait in started:
            found.update(zip(numbers, wait(), strict=True))
        return list(found.values())

    return answers


def _finite_in_parts(tensor: torch.Tensor, limit: float) -> bool:
    for part in parts(tensor):
        if tensor.dtype == FP8_DTYPE:
            if bool(((part.view(torch.uint8) & 0x7F) == 0x7F).any()):
                return False
        elif part.numel():
            part = part.float() if part.element_size() == 1 else part
            low, high = (float(each) for each in part.detach().aminmax())  # a NaN makes both NaN
            if not (max(-low, high) <= limit and math.isfinite(low) and math.isfinite(high)):
                return False
    return True


def largest_bits(dtype: torch.dtype, limit: float) -> int:
    """Return the bits of the largest finite number up to a positive limit, as an integer.

    The bits of positive numbers have the order of the numbers; infinity and NaN come last.
    """
    if dtype == FP8_DTYPE:
        return 0x7E
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    number = torch.tensor(min(limit, torch.finfo(dtype).max), dtype=torch.float64)
    bits = int(number.to(dtype).view(kind))
    return bits - int(number.to(dtype).double() > number)  # rounded up: take the number before


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Slices along the first dimension of about ``_SCAN_ELEMENTS`` elements."""
    if tensor.ndim == 0:
        return (tensor,)
    row = max(1, tensor.numel() // max(1, tensor.shape[0]))
    return tensor.split(max(1, _SCAN_ELEMENTS // row))

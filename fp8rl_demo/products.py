"""BF16 matrix products on CPUs that have no instructions for them.

Without AVX-512 torch multiplies BF16 matrices eight times as slowly as float32 ones, and the demo
took an hour. In float32, with the result rounded once, they are what BF16 hardware computes, up to
the order of sums.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def float32_products() -> Iterator[None]:
    """Let torch compute ``mm``, ``addmm``, ``bmm`` and ``baddbmm`` of BF16 in float32.

    Inside the block that holds for the whole process, forward and backward. On a CPU with AVX-512,
    and on others than x86, nothing changes.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() != "x86_64" or capability not in ("DEFAULT", "AVX2"):
        yield
        return
    aten = torch.ops.aten
    library = torch.library.Library("aten", "IMPL")  # it holds while this object lives
    for name, kernel in (
        ("mm", _product(aten.mm.out)),
        ("bmm", _product(aten.bmm.out)),
        ("addmm", _sum_with_product(aten.addmm.out)),
        ("baddbmm", _sum_with_product(aten.baddbmm.out)),
    ):
        with warnings.catch_warnings(action="ignore"):  # that torch's kernel is replaced
            library.impl(name, kernel, "CPU", allow_override=True)
    yield


def _product(out: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a product that is computed by torch's kernel ``out``, which stays as it is."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        wide = _wide(a, b)
        return out(*wide, out=_empty(*wide)).to(a.dtype)

    return product


def _sum_with_product(out: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As :func:`_product`, for ``beta * c + alpha * a @ b``."""

    def total(c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        wide = _wide(c, a, b)
        return out(*wide, beta=beta, alpha=alpha, out=_empty(*wide[1:])).to(a.dtype)

    return total


def _wide(*operands: Tensor) -> list[Tensor]:
    """Return operands that are all in BF16 in float32, and others as they are."""
    if any(x.dtype != torch.bfloat16 for x in operands):
        return list(operands)
    return [x.float() for x in operands]


def _empty(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))

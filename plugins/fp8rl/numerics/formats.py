"""The number format: constants, the pair (codes, scale_inv), and shape checks."""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.recipe import ScaleFormat

FP8_DTYPE = torch.float8_e4m3fn
E4M3_MAX = 448.0
BLOCK = (128, 128)
GROUP = 128
LEAST_INT8_SCALE = 1e-6
"""Smallest scale of a row of an INT8 KV cache, as in vLLM: a row of zeros has one too."""
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_FORMATS = get_args(ScaleFormat)


class Quantized(NamedTuple):
    """FP8 codes with the factors that multiply them back: ``x = codes * scale_inv``.

    codes: float8_e4m3fn, the source's shape; zeros may fill the last group of each row.
    scale_inv: float32; ``[ceil(N/128), ceil(K/128)]`` for blocks, ``[..., ceil(K/128)]`` for
    groups.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor


class Stacked(NamedTuple):
    """Weights of a layer's experts, and the stack that takes their codes.

    weights: at least one, ``[N, K]`` each.
    out: codes ``[E, N, K]`` and scale_inv ``[E, ceil(N/128), ceil(K/128)]``; each matrix is
    contiguous, the stack need not be.
    at: for each weight, the number of its matrix in the stack; no number twice.
    """

    weights: list[torch.Tensor]
    out: Quantized
    at: list[int]


class Operand(NamedTuple):
    """One tensor quantized for products along either of its dimensions; a side may be None.

    rowwise: codes ``[N, K]``; columnwise: codes ``[K, N]``; both K-major as FP8 tensor cores need.
    """

    rowwise: Quantized | None
    columnwise: Quantized | None


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)`` for integers."""
    return -(-a // b)


def whole_groups(width: int) -> int:
    """Round a width up to whole groups of 128."""
    return cdiv(width, GROUP) * GROUP


def check_source(x: torch.Tensor, *, ndim: int | None, scale_format: ScaleFormat) -> None:
    """Raise UnsupportedError for a dtype, rank or scale format that cannot be quantized."""
    if not isinstance(x, torch.Tensor):
        raise UnsupportedError(f"Cannot quantize a {type(x).__name__}; give a torch.Tensor.")
    if x.dtype not in SOURCE_DTYPES:
        remedy = "convert it to bfloat16, float16 or float32 first"
        if x.dtype.itemsize == 1 and x.dtype != torch.bool:
            remedy = "multiply codes by their scales first"
        raise UnsupportedError(f"Cannot quantize a tensor of dtype {x.dtype}; {remedy}.")
    if x.layout is not torch.strided:
        raise UnsupportedError("Cannot quantize a sparse tensor; make it dense (to_dense) first.")
    if x.ndim == 0 or (ndim is not None and x.ndim != ndim):
        raise UnsupportedError(
            f"Cannot quantize a tensor of shape {tuple(x.shape)}; expected "
            f"{'at least 1' if ndim is None else ndim} dimension(s)."
        )
    if scale_format not in _SCALE_FORMATS:
        raise UnsupportedError(
            f"Unknown scale_format '{scale_format}'; use one of {', '.join(_SCALE_FORMATS)}."
        )


def check_codes(codes: torch.Tensor, *, ndim: int | None) -> None:
    """Raise UnsupportedError unless ``codes`` are E4M3 of a rank that can be dequantized."""
    if codes.dtype != FP8_DTYPE or codes.ndim == 0 or (ndim is not None and codes.ndim != ndim):
        raise UnsupportedError(
            f"Cannot dequantize {codes.dtype} of shape {tuple(codes.shape)}; expected "
            f"{'at least 1' if ndim is None else ndim} dimension(s) of {FP8_DTYPE}."
        )


def check_scale_shape(scale_inv: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise UnsupportedError unless ``scale_inv`` is float32 of the ``expected`` shape."""
    if scale_inv.dtype != torch.float32 or scale_inv.shape != expected:
        raise UnsupportedError(
            f"scale_inv must be float32 of shape {expected}, not {scale_inv.dtype} of shape "
            f"{tuple(scale_inv.shape)}."
        )


def check_out(out: Quantized, w: torch.Tensor, block: tuple[int, int]) -> None:
    """Raise UnsupportedError unless ``out`` can take the codes and scales of ``w``."""
    codes, scale_inv = out
    shape, device = w.shape, w.device
    check_scale_shape(scale_inv, (cdiv(shape[0], block[0]), cdiv(shape[1], block[1])))
    fits = codes.shape == shape and codes.dtype == FP8_DTYPE
    contiguous = codes.is_contiguous() and scale_inv.is_contiguous()
    if not (fits and contiguous and codes.device == scale_inv.device == device):
        raise UnsupportedError(
            f"out.codes must be contiguous {FP8_DTYPE} of shape {tuple(w.shape)} and, like "
            f"out.scale_inv, on {w.device}."
        )

"""MXFP8: E4M3 codes in groups of 32 with E8M0 scales (OCP Microscaling Formats 1.0).

Source: the scale is rounded up, so that no value is clipped, as vLLM (``mxfp8_e4m3_quantize``),
TransformerEngine and cuBLAS do; the OCP text's own rule rounds it down and clips. No engine of this
repository multiplies such operands; NeMo RL calls the format ``is_mx``.
"""

from __future__ import annotations

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics.dispatch import dequantize_group, quantize_group
from fp8rl.numerics.formats import MX_GROUP, Quantized


def quantize_mx(x: torch.Tensor) -> Quantized:
    """Quantize in groups of 32 along the last dimension.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32. A partial last group is padded with zeros.

    Returns:
        codes ``float8_e4m3fn [..., K]`` contiguous, scale_inv ``float8_e8m0fnu [..., ceil(K/32)]``:
        the smallest power of two at or above ``amax / 448``, with an exponent in [-127, 127]. As in
        all formats of this package a group takes scale 1 if its amax is zero or not finite.

    Raises:
        UnsupportedError: wrong dtype or rank.
    """
    codes, scale_inv = quantize_group(x, MX_GROUP, "pow2")
    return Quantized(codes, scale_inv.to(torch.float8_e8m0fnu))


def dequantize_mx(
    codes: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Multiply codes with the scales of their groups.

    Args:
        codes: ``float8_e4m3fn [..., K]``.
        scale_inv: ``float8_e8m0fnu [..., ceil(K/32)]``.
        dtype: dtype of the result.

    Raises:
        UnsupportedError: codes or scales of another dtype or shape.
    """
    if scale_inv.dtype != torch.float8_e8m0fnu:
        raise UnsupportedError(
            f"Scales of MXFP8 are {torch.float8_e8m0fnu}, not {scale_inv.dtype}; use "
            "dequantize_group for others."
        )
    return dequantize_group(codes, scale_inv.float(), MX_GROUP, dtype)

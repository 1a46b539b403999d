"""The torch reference: plain float32 operations on any device, checked against float64 in tests.

Functions that :mod:`fp8rl.numerics` has too are described there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8rl.numerics.formats import (
    BLOCK,
    E4M3_MAX,
    FP8_DTYPE,
    GROUP,
    LEAST_INT8_SCALE,
    Operand,
    Quantized,
    Stacked,
    cdiv,
)
from fp8rl.numerics.grouped import Addresses, ExpertRows, GroupedColumns, GroupedRows
from fp8rl.recipe import ScaleFormat


def quantization_scales(
    amax: torch.Tensor, scale_format: ScaleFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(scale, scale_inv)`` of blocks or groups with these amaxes.

    Args:
        amax: float32, any shape.
        scale_format: ``fp32``, or ``pow2`` for power-of-two scales.

    Returns:
        Two float32 tensors of the shape of ``amax``.
    """
    one = torch.ones_like(amax)
    # For a Python number torch computes `448 / amax` as reciprocal(amax) * 448, rounded twice.
    scale = torch.full_like(amax, E4M3_MAX) / amax
    usable = torch.isfinite(amax) & torch.isfinite(scale)
    if scale_format == "fp32":
        scale = torch.where(usable, scale, one)
        return scale, scale.reciprocal()
    # amax = m * 2**e with m in [0.5, 1) and 448 = 0.875 * 2**9. This is exact where log2, or the
    # quotient near the subnormals, would round.
    mantissa, exponent = torch.frexp(torch.where(usable, amax, one))
    exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(-127, 127)
    scale_inv = torch.where(usable, torch.ldexp(one, exponent), one)
    scale = torch.where(usable, torch.ldexp(one, -exponent), one)
    return scale, scale_inv


def _pad(x: torch.Tensor, amounts: tuple[int, ...]) -> torch.Tensor:
    # F.pad copies even where there is nothing to add.
    return torch.nn.functional.pad(x, amounts) if any(amounts) else x


def _encode(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x * scale).clamp_(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)


def _decode(codes: torch.Tensor) -> torch.Tensor:
    """``codes.float()``, which torch computes element by element on a CPU and is slow there."""
    if codes.device.type != "cpu":
        return codes.float()
    raw = codes.view(torch.uint8)
    # A float16 with the same sign, exponent and mantissa bits; its exponent bias is larger by 8.
    bits = raw.to(torch.int16).bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
    values = bits.view(torch.float16).float().mul_(256.0)
    magnitude = raw.bitwise_and(0x7F)
    if magnitude.numel() and magnitude.amax() == 0x7F:
        values.masked_fill_(magnitude == 0x7F, float("nan"))
    return values


def quantize_block(
    w: torch.Tensor, block: tuple[int, int], scale_format: ScaleFormat, out: Quantized | None = None
) -> Quantized:
    (n, k), (bn, bk) = w.shape, block
    rows, cols = cdiv(n, bn), cdiv(k, bk)
    padded = _pad(w.float(), (0, cols * bk - k, 0, rows * bn - n))
    tiles = padded.view(rows, bn, cols, bk)
    scale, scale_inv = quantization_scales(tiles.abs().amax(dim=(1, 3)), scale_format)
    codes = _encode(tiles, scale[:, None, :, None]).view(rows * bn, cols * bk)[:n, :k]
    if out is None:
        return Quantized(codes.contiguous(), scale_inv)
    out.codes.copy_(codes)
    out.scale_inv.copy_(scale_inv)
    return out


def quantize_blocks(
    jobs: Sequence[tuple[torch.Tensor, Quantized]],
    block: tuple[int, int],
    scale_format: ScaleFormat,
    stacks: Sequence[Stacked] = (),
) -> None:
    for w, out in jobs:
        quantize_block(w.detach(), block, scale_format, out)
    for weights, (codes, scale_inv), at in stacks:
        for w, number in zip(weights, at, strict=True):
            out = Quantized(codes[number], scale_inv[number])
            quantize_block(w.detach(), block, scale_format, out)


def quantize_group(x: torch.Tensor, group: int, scale_format: ScaleFormat) -> Quantized:
    k = x.shape[-1]
    groups = cdiv(k, group)
    padded = _pad(x.float(), (0, groups * group - k))
    tiles = padded.view(*x.shape[:-1], groups, group)
    scale, scale_inv = quantization_scales(tiles.abs().amax(dim=-1), scale_format)
    codes = _encode(tiles, scale[..., None]).flatten(-2)
    return Quantized(codes[..., :k].contiguous(), scale_inv)


def mark_inf(x: torch.Tensor) -> torch.Tensor:
    """Turn every infinity in ``x`` into NaN.

    E4M3 has no infinity: quantization would clamp it to 448 and hide an overflow. NaN has a code,
    and stays NaN in every product.
    """
    nan = float("nan")
    return x.nan_to_num(nan, nan, nan)


def quantize_operand(
    x: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    x = mark_inf(x)
    return Operand(
        quantize_group(x, GROUP, scale_format) if rowwise else None,
        quantize_group(x.t().contiguous(), GROUP, scale_format) if columnwise else None,
    )


def quantize_weight(
    w: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    codes, scale_inv = quantize_block(mark_inf(w), BLOCK, scale_format)
    return Operand(
        Quantized(codes, scale_inv) if rowwise else None,
        Quantized(codes.t(), scale_inv.t()) if columnwise else None,
    )


ALIGNMENT = 1
"""Rows of a tile of one expert: 1, so no tile holds rows of two."""


def quantize_grouped(
    x: torch.Tensor,
    expert_rows: ExpertRows,
    scale_format: ScaleFormat,
    rowwise: bool,
    columnwise: bool,
) -> tuple[GroupedRows | None, GroupedColumns | None]:
    x = mark_inf(x)
    by_rows = by_columns = None
    if rowwise:
        by_rows = GroupedRows(*quantize_group(x, GROUP, scale_format), expert_rows)
    if columnwise:
        runs = x.split(expert_rows.splits)
        made = [
            quantize_group(runs[expert].t().contiguous(), GROUP, scale_format)
            for expert in expert_rows.order
        ]
        # Bytes, because E4M3 has no cat kernel.
        raw = [q.codes.view(torch.uint8).flatten() for q in made] or [x.new_empty(0).byte()]
        scales = [q.scale_inv.t() for q in made] or [x.new_empty(0, x.shape[1]).float()]
        by_columns = GroupedColumns(torch.cat(raw).view(FP8_DTYPE), torch.cat(scales), expert_rows)
    return by_rows, by_columns


def quantize_weights(
    weights: Sequence[torch.Tensor],
    scale_format: ScaleFormat,
    rowwise: bool,
    columnwise: bool,
    known: Addresses,
) -> Operand:
    made = [quantize_block(mark_inf(w), BLOCK, scale_format) for w in weights]
    codes = torch.stack([q.codes.view(torch.uint8) for q in made]).view(FP8_DTYPE)
    scale_inv = torch.stack([q.scale_inv for q in made])
    return Operand(
        Quantized(codes, scale_inv) if rowwise else None,
        Quantized(codes.mT, scale_inv.mT) if columnwise else None,
    )


def place_boundaries(y: torch.Tensor, expert_rows: ExpertRows) -> None:
    for _, start, rows, place in expert_rows.boundaries:
        y[start : start + rows] = y[place : place + rows]


def swiglu(h: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``h = [gate, up]``, in float32, rounded once to ``h``'s dtype."""
    gate, up = h.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(h.dtype)


def swiglu_grad(grad: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Gradient of ``h`` from that of :func:`swiglu`, rounded once to ``h``'s dtype."""
    (gate, up), grad = h.float().chunk(2, -1), grad.float()
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up
    return torch.cat((gate_grad, grad * (gate * sigmoid)), -1).to(h.dtype)


def quantize_swiglu(
    h: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    return quantize_operand(swiglu(h), scale_format, rowwise, columnwise)


def quantize_swiglu_grad(
    grad: torch.Tensor, h: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    return quantize_operand(swiglu_grad(grad, h), scale_format, rowwise, columnwise)


def dequantize_block(
    codes: torch.Tensor, scale_inv: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    (n, k), (bn, bk) = codes.shape, block
    factors = scale_inv.repeat_interleave(bn, 0)[:n].repeat_interleave(bk, 1)[:, :k]
    return _decode(codes).mul_(factors).to(dtype)


def dequantize_group(
    codes: torch.Tensor, scale_inv: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    factors = scale_inv.repeat_interleave(group, -1)[..., : codes.shape[-1]]
    return _decode(codes).mul_(factors).to(dtype)


def fake_quantize_kv(
    k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, clipped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    made = []
    for x, scale, cell in zip((k, v), scales, clipped, strict=True):
        scaled = x.contiguous().float() / scale
        cell.add_((scaled.abs() > E4M3_MAX).sum())
        codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(FP8_DTYPE)
        largest = torch.finfo(x.dtype).max  # float16 would round 256 * 256 to infinity
        made.append(_decode(codes).mul_(scale).clamp_(-largest, largest).to(x.dtype))
    return made[0], made[1]


def fake_quantize_int8_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (dequantize_int8(*quantize_int8(x), x.dtype) for x in (k, v))
    return key, value


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of an INT8 cache; see :func:`fp8rl.numerics.fake_quantize_int8_kv`.

    Returns:
        uint8 codes with 128 added, like ``x``; float32 scales ``[.., 1]``.
    """
    rows = x.contiguous().float()
    scale = (rows.abs().amax(-1, keepdim=True) / 127).clamp_(min=LEAST_INT8_SCALE)
    scale += (rows * 0).sum(-1, keepdim=True)  # NaN for infinity too
    return (rows / scale + 128.5).nan_to_num_(0).to(torch.uint8), scale


def dequantize_int8(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of :func:`quantize_int8`, rounded once to ``dtype``."""
    return ((codes.float() - 128) * scale).to(dtype)


def amax_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    for cell, x in zip(out, tensors, strict=True):
        if x.numel():
            # The norm keeps NaN and needs no copy of |x|.
            torch.maximum(cell, torch.linalg.vector_norm(x.detach(), torch.inf), out=cell)

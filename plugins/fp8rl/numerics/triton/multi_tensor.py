"""Multi-tensor Triton kernels: quantization and the finite check of many tensors in one launch.

The weights of a model would take 250 launches otherwise. Addresses reach the GPU as a table of
integers with one row a tensor, in one copy from pinned memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import triton
import triton.language as tl

from fp8rl.numerics.finite import largest_bits
from fp8rl.numerics.formats import FP8_DTYPE, Quantized, Stacked, cdiv
from fp8rl.numerics.grouped import on_device
from fp8rl.numerics.triton.quantize import has_native_cast, quantize_tile
from fp8rl.recipe import ScaleFormat

TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_MAGNITUDES = {
    torch.bfloat16: (tl.int16, 0x7FFF),
    torch.float16: (tl.int16, 0x7FFF),
    torch.float32: (tl.int32, 0x7FFFFFFF),
    FP8_DTYPE: (tl.uint8, 0x7F),
}
"""Integer type of an element, and the mask of its bits without the sign."""
_CHUNK = 1 << 17
"""Elements that one program of the finite check reads."""
_STEP = 1 << 13
_ALIGNMENT = 16  # bytes: the widest load of a thread


# Each launch gets its part of the table, aligned or not.
@triton.jit(do_not_specialize=["table_ptr", "tile_cols"])
def _multi_tensor_kernel(
    table_ptr,
    rows,
    cols,
    stride_row,
    stride_col,
    tile_cols,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    entry = table_ptr + tl.program_id(1) * 3
    x_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    codes_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.uint8))
    if ALIGNED:  # without this hint every access would be a scalar
        x_ptr = tl.multiple_of(x_ptr, 16)
        codes_ptr = tl.multiple_of(codes_ptr, 16)
    quantize_tile(
        x_ptr,
        codes_ptr,
        tl.load(entry + 2).to(tl.pointer_type(tl.float32)),
        rows,
        cols,
        stride_row,
        stride_col,
        tile_cols,
        TILE_ROWS,
        TILE_COLS,
        False,
        POW2,
        NATIVE,
    )


@triton.jit(do_not_specialize=["tensors"])
def _finite_kernel(
    table_ptr,
    bad_ptr,
    tensors,
    DTYPE: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    LARGEST: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    chunk = tl.program_id(0)
    low, high = 0, tensors  # binary search for the tensor that has this chunk
    while low < high:
        middle = (low + high) // 2
        before = tl.load(table_ptr + middle * 4 + 3) <= chunk
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    entry = table_ptr + low * 4
    elements = tl.load(entry + 1)
    first = (chunk - tl.load(entry + 3) + (elements + CHUNK - 1) // CHUNK) * CHUNK
    x_ptr = tl.load(entry).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    x_ptr += first
    count = tl.minimum(elements - first, CHUNK).to(tl.int32)
    found = tl.zeros((STEP,), tl.int32)
    if count == CHUNK:  # no mask: it would make every access a scalar
        for step in range(0, CHUNK, STEP):
            x = tl.load(x_ptr + step + tl.arange(0, STEP)).to(tl.int32)
            found |= ((x & MAGNITUDE) > LARGEST).to(tl.int32)
    else:
        for step in range(0, count, STEP):
            at = step + tl.arange(0, STEP)
            x = tl.load(x_ptr + at, at < count, other=0).to(tl.int32)
            found |= ((x & MAGNITUDE) > LARGEST).to(tl.int32)
    if tl.max(found, 0) > 0:
        tl.store(bad_ptr + tl.load(entry + 2), 1)


def quantize_blocks(
    jobs: Sequence[tuple[torch.Tensor, Quantized]],
    block: tuple[int, int],
    scale_format: ScaleFormat,
    stacks: Sequence[Stacked] = (),
) -> None:
    """See :func:`fp8rl.numerics.quantize_blocks`; ``block`` sides are powers of two."""
    groups: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], list[int]] = {}
    """Addresses of weight, codes and scales, for the weights of one launch."""
    for x, (codes, scale_inv) in jobs:
        group = groups.setdefault((x.shape, x.stride(), x.dtype), [])
        group += (x.data_ptr(), codes.data_ptr(), scale_inv.data_ptr())
    for weights, (codes, scale_inv), at in stacks:
        first, step = codes.data_ptr(), codes.stride(0)
        first_scale, scale_step = scale_inv.data_ptr(), 4 * scale_inv.stride(0)
        for x, number in zip(weights, at, strict=True):
            group = groups.setdefault((x.shape, x.stride(), x.dtype), [])
            group += (x.data_ptr(), first + number * step, first_scale + number * scale_step)
    some = jobs[0][0] if jobs else stacks[0].weights[0]
    table = [address for group in groups.values() for address in group]
    with torch.cuda.device_of(some):
        addresses = on_device(torch.tensor(table, dtype=torch.int64), some.device)
        tables = addresses.split([len(group) for group in groups.values()])
        for ((shape, steps, dtype), group), entries in zip(groups.items(), tables, strict=True):
            tile_cols = cdiv(shape[1], block[1])
            tiles = cdiv(shape[0], block[0]) * tile_cols
            if not tiles:
                continue
            _multi_tensor_kernel[(tiles, len(group) // 3)](
                entries,
                *shape,
                *steps,
                tile_cols,
                DTYPE=TRITON_DTYPES[dtype],
                ALIGNED=all_aligned(group[::3]) and all_aligned(group[1::3]),
                TILE_ROWS=block[0],
                TILE_COLS=block[1],
                POW2=scale_format == "pow2",
                NATIVE=has_native_cast(some.device),
                num_warps=8,
                enable_fp_fusion=False,
            )


def start_finite_check(
    tensors: Sequence[torch.Tensor], limit: float = math.inf
) -> Callable[[], list[bool]]:
    """See :func:`fp8rl.numerics.start_finite_check`; the tensors are contiguous, on one device."""
    groups: dict[torch.dtype, list[int]] = {}
    for number, x in enumerate(tensors):
        if x.numel():
            groups.setdefault(x.dtype, []).append(number)
    if not groups:
        nothing = [True] * len(tensors)
        return lambda: nothing
    device = tensors[0].device
    with torch.cuda.device_of(tensors[0]):
        bad = torch.zeros(len(tensors), dtype=torch.int32, device=device)
        for dtype, numbers in groups.items():
            table: list[int] = []
            chunks = 0
            for n in numbers:
                count = tensors[n].numel()
                chunks += cdiv(count, _CHUNK)
                table += (tensors[n].data_ptr(), count, n, chunks)
            kind, magnitude = _MAGNITUDES[dtype]
            _finite_kernel[(chunks,)](
                on_device(torch.tensor(table, dtype=torch.int64), device),
                bad,
                len(numbers),
                DTYPE=kind,
                MAGNITUDE=magnitude,
                LARGEST=largest_bits(dtype, limit),
                ALIGNED=all_aligned(table[::4]),
                CHUNK=_CHUNK,
                STEP=_STEP,
                num_warps=8,
            )
    return lambda: [flag == 0 for flag in bad.tolist()]


def all_aligned(addresses: Iterable[int]) -> bool:
    return all(address % _ALIGNMENT == 0 for address in addresses)

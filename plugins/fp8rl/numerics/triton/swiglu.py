"""Triton kernels that compute SwiGLU, or its gradient, and quantize the result at once.

They read bfloat16 tiles with the functions of :mod:`fp8rl.numerics.triton.packed`; neither the
activation nor the gradient of gate and up is written to memory. A source that cannot be packed, or
whose halves end within a group, is computed first and quantized then.
"""

# mypy: disable-error-code="assignment"
# The unrolled loops of the kernels make tuples longer, for which mypy has no type.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fp8rl.numerics import reference
from fp8rl.numerics.formats import GROUP, Operand, cdiv
from fp8rl.numerics.triton.dual import DualOutput, quantize_operand
from fp8rl.numerics.triton.packed import (
    can_pack,
    high_pair,
    load_packed,
    low_pair,
    packed_pointers,
    quantize_packed_groups,
)
from fp8rl.numerics.triton.quantize import has_native_cast
from fp8rl.recipe import ScaleFormat

# The tile stays in registers, since reading it again would mean computing it again.
_REGISTERS = 128
_WIDTH = 1024  # columns of a row that one program computes, without quantization
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@triton.jit
def _sigmoid(x, NATIVE: tl.constexpr):
    if NATIVE:  # tl.sigmoid takes three times as many instructions, to serve subnormal results
        exponential = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + exponential], tl.float32, True, 1
        )
    return tl.sigmoid(x)


@triton.jit
def _first(pair):
    """The first of the two bfloat16 values in a word, as float32."""
    return (pair << 16).to(tl.float32, bitcast=True)


@triton.jit
def _second(pair):
    return (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x):
    """Round to bfloat16, bits in the upper half of a word; the interpreter would truncate."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest)


@triton.jit
def _pair(first, second, NATIVE: tl.constexpr):
    """Round two float32 values to bfloat16 and put them into a word."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], tl.int32, True, 1
        )
    return ((_rounded(first) >> 16) & 0xFFFF) | _rounded(second)


@triton.jit
def _narrowed(x, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    # One return: Triton compiles what follows a return too, and the types would differ.
    if NATIVE or tl.bfloat16 != DTYPE:
        y = x.to(DTYPE)
    else:
        y = (_rounded(x) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def _pack(low, high):
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _tile_pointers(x_ptr, tile_row, tile_col, stride):
    """Pointers to the words of the rows 0, 4, 8.. of a tile."""
    first = x_ptr + tile_row * 128 * stride + tile_col * 128
    return packed_pointers(first.to(tl.pointer_type(tl.int64)), stride // 4)


@triton.jit
def swiglu(gate, up, NATIVE: tl.constexpr):
    """``silu(gate) * up`` in float32."""
    return gate * _sigmoid(gate, NATIVE) * up


@triton.jit
def _swiglu_pair(gate, up, NATIVE: tl.constexpr):
    return _pair(
        swiglu(_first(gate), _first(up), NATIVE), swiglu(_second(gate), _second(up), NATIVE), NATIVE
    )


@triton.jit
def _swiglu_tile(at, up, step, left, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    x = ()
    for i in tl.static_range(4):
        row = at + i * step
        gate = load_packed(row, i, left, MASKED)
        of_up = load_packed(row + up, i, left, MASKED)
        low = _swiglu_pair(low_pair(gate), low_pair(of_up), NATIVE)
        x += (_pack(low, _swiglu_pair(high_pair(gate), high_pair(of_up), NATIVE)),)
    return x


@triton.jit
def _gate_grad(grad, gate, up, NATIVE: tl.constexpr):
    sigmoid = _sigmoid(gate, NATIVE)
    return grad * sigmoid * (1.0 + gate * (1.0 - sigmoid)) * up


@triton.jit
def _gate_grad_pair(grad, gate, up, NATIVE: tl.constexpr):
    return _pair(
        _gate_grad(_first(grad), _first(gate), _first(up), NATIVE),
        _gate_grad(_second(grad), _second(gate), _second(up), NATIVE),
        NATIVE,
    )


@triton.jit
def _gate_grad_tile(grad_at, up, at, step, left, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    x = ()
    for i in tl.static_range(4):
        grad_row, row = grad_at + i * up, at + i * step
        grad = load_packed(grad_row, i, left, MASKED)
        gate = load_packed(row, i, left, MASKED)
        of_up = load_packed(row + up, i, left, MASKED)
        low = _gate_grad_pair(low_pair(grad), low_pair(gate), low_pair(of_up), NATIVE)
        high = _gate_grad_pair(high_pair(grad), high_pair(gate), high_pair(of_up), NATIVE)
        x += (_pack(low, high),)
    return x


@triton.jit
def _up_grad_pair(grad, gate, NATIVE: tl.constexpr):
    first, second = _first(gate), _second(gate)
    return _pair(
        _first(grad) * (first * _sigmoid(first, NATIVE)),
        _second(grad) * (second * _sigmoid(second, NATIVE)),
        NATIVE,
    )


@triton.jit
def _up_grad_tile(grad_at, up, at, step, left, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    x = ()
    for i in tl.static_range(4):
        grad_row, row = grad_at + i * up, at + i * step
        grad = load_packed(grad_row, i, left, MASKED)
        gate = load_packed(row, i, left, MASKED)
        low = _up_grad_pair(low_pair(grad), low_pair(gate), NATIVE)
        x += (_pack(low, _up_grad_pair(high_pair(grad), high_pair(gate), NATIVE)),)
    return x


# The number of tokens differs from step to step: what follows from it must not compile anew.
@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def swiglu_kernel(
    h_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    stride_row,
    padded_rows,
    scale_stride,
    scale_t_stride,
    tile_cols,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize ``silu(gate) * up`` of ``h = [gate, up]``, ``cols`` each, one tile a program."""
    tile_row = (tl.program_id(0) // tile_cols).to(tl.int64)
    tile_col = (tl.program_id(0) % tile_cols).to(tl.int64)
    left = rows - tile_row * 128
    step = stride_row // 4
    up = cols // 4
    at = _tile_pointers(h_ptr, tile_row, tile_col, stride_row)
    x = _swiglu_tile(at, up, step, left, MASKED, NATIVE)
    rowwise, columnwise = None, None
    if ROWWISE:
        codes_at = codes_ptr + tile_row * 128 * cols + tile_col * 128
        rowwise = (codes_at, scale_inv_ptr + tile_col * scale_stride + tile_row * 128, cols)
    if COLUMNWISE:
        codes_at = codes_t_ptr + tile_col * 128 * padded_rows + tile_row * 128
        scale_at = scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128
        columnwise = (codes_at, scale_at, padded_rows)
    quantize_packed_groups(x, left, rowwise, columnwise, MASKED, POW2, NATIVE)


@triton.jit(do_not_specialize=["rows", "scale_stride", "scale_t_stride", "tile_cols"])
def swiglu_grad_kernel(
    grad_ptr,
    h_ptr,
    codes_ptr,
    scale_inv_ptr,
    codes_t_ptr,
    scale_inv_t_ptr,
    rows,
    cols,
    stride_row,
    padded_rows,
    scale_stride,
    scale_t_stride,
    tile_cols,
    ROWWISE: tl.constexpr,
    COLUMNWISE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Quantize the gradient of ``h``, one tile a program; see :func:`swiglu_kernel`.

    ``grad_ptr`` is the contiguous gradient of ``silu(gate) * up``.
    """
    tile_row = (tl.program_id(0) // (2 * tile_cols)).to(tl.int64)
    within = tl.program_id(0) % (2 * tile_cols)
    # The two programs that read the same tiles have neighbouring numbers, for the cache.
    tile_col = (within // 2).to(tl.int64)
    of_up = within % 2
    left = rows - tile_row * 128
    step = stride_row // 4
    up = cols // 4
    at = _tile_pointers(h_ptr, tile_row, tile_col, stride_row)
    grad_at = _tile_pointers(grad_ptr, tile_row, tile_col, cols)
    if of_up == 1:
        x = _up_grad_tile(grad_at, up, at, step, left, MASKED, NATIVE)
    else:
        x = _gate_grad_tile(grad_at, up, at, step, left, MASKED, NATIVE)
    tile_col += of_up * tile_cols
    rowwise, columnwise = None, None
    if ROWWISE:
        codes_at = codes_ptr + tile_row * 256 * cols + tile_col * 128
        scale_at = scale_inv_ptr + tile_col * scale_stride + tile_row * 128
        rowwise = (codes_at, scale_at, 2 * cols)
    if COLUMNWISE:
        codes_at = codes_t_ptr + tile_col * 128 * padded_rows + tile_row * 128
        scale_at = scale_inv_t_ptr + tile_row * scale_t_stride + tile_col * 128
        columnwise = (codes_at, scale_at, padded_rows)
    quantize_packed_groups(x, left, rowwise, columnwise, MASKED, POW2, NATIVE)


@triton.jit
def _plain_kernel(x_ptr, y_ptr, columns, stride_row, WIDTH: tl.constexpr, NATIVE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    at = x_ptr + row * stride_row + column
    gate = tl.load(at, inside, other=0.0)
    up = tl.load(at + columns, inside, other=0.0)
    y = _narrowed(swiglu(gate.to(tl.float32), up.to(tl.float32), NATIVE), gate.dtype, NATIVE)
    tl.store(y_ptr + row * columns + column, y, inside)


@triton.jit
def _plain_grad_kernel(
    grad_ptr,
    h_ptr,
    y_ptr,
    columns,
    stride_grad,
    stride_row,
    WIDTH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < columns
    grad = tl.load(grad_ptr + row * stride_grad + column, inside, other=0.0).to(tl.float32)
    at = h_ptr + row * stride_row + column
    gate = tl.load(at, inside, other=0.0)
    up = tl.load(at + columns, inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    of_gate = _gate_grad(grad, wide, up, NATIVE)
    of_up = grad * (wide * _sigmoid(wide, NATIVE))
    y_ptr += row * 2 * columns + column
    tl.store(y_ptr, _narrowed(of_gate, gate.dtype, NATIVE), inside)
    tl.store(y_ptr + columns, _narrowed(of_up, gate.dtype, NATIVE), inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(x[:, :K]) * x[:, K:]`` of 16 bits, computed in float32 and rounded once.

    The values are those that :func:`fp8rl.numerics.triton.activations.quantize_rows` quantizes with
    ``silu_and_mul``.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, columns = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, columns)
    if rows:
        with torch.cuda.device_of(x):
            _plain_kernel[(rows, triton.cdiv(columns, _WIDTH))](
                x, y, columns, x.stride(0), WIDTH=_WIDTH, NATIVE=has_native_cast(x.device)
            )
    return y


def _silu_and_mul_grad(grad: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``h`` ``[M, 2 K]`` from that of :func:`silu_and_mul`."""
    grad, h = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad, h))
    rows, columns = grad.shape
    y = h.new_empty(rows, 2 * columns)
    with torch.cuda.device_of(h):
        _plain_grad_kernel[(rows, triton.cdiv(columns, _WIDTH))](
            grad,
            h,
            y,
            columns,
            grad.stride(0),
            h.stride(0),
            WIDTH=_WIDTH,
            NATIVE=has_native_cast(h.device),
            enable_fp_fusion=False,
        )
    return y


def _ends_within_a_group(h: torch.Tensor) -> bool:
    """Tell whether each half of ``h`` ends within a group, and the kernels above compute it.

    Theirs are the bits of the rollout's kernel, which torch's sigmoid does not have.
    """
    return bool(h.numel()) and h.shape[1] // 2 % GROUP != 0 and h.dtype in _SIXTEEN_BITS


def quantize_swiglu(
    h: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    rows, cols = h.shape[0], h.shape[1] // 2
    if _ends_within_a_group(h):
        return quantize_operand(silu_and_mul(h), scale_format, rowwise, columnwise)
    if not (rows and cols and can_pack(h)):
        return quantize_operand(reference.swiglu(h), scale_format, rowwise, columnwise)
    output = DualOutput(h, (rows, cols), scale_format, rowwise, columnwise)
    return _launch(swiglu_kernel, (h,), h, output, cols)


def quantize_swiglu_grad(
    grad: torch.Tensor, h: torch.Tensor, scale_format: ScaleFormat, rowwise: bool, columnwise: bool
) -> Operand:
    rows, cols = grad.shape
    if _ends_within_a_group(h):
        return quantize_operand(_silu_and_mul_grad(grad, h), scale_format, rowwise, columnwise)
    if not (rows and cols and can_pack(h) and can_pack(grad) and grad.is_contiguous()):
        of_h = reference.swiglu_grad(grad, h)
        return quantize_operand(of_h, scale_format, rowwise, columnwise)
    output = DualOutput(h, (rows, 2 * cols), scale_format, rowwise, columnwise)
    return _launch(swiglu_grad_kernel, (grad, h), h, output, 2 * cols)


def _launch(
    kernel: triton.JITFunction,
    sources: tuple[torch.Tensor, ...],
    h: torch.Tensor,
    output: DualOutput,
    width: int,
) -> Operand:
    rows, cols = h.shape[0], h.shape[1] // 2
    with torch.cuda.device_of(h):
        kernel[(cdiv(rows, GROUP) * (width // GROUP),)](
            *sources,
            *output.pointers,
            rows,
            cols,
            h.stride(0),
            output.padded_rows,
            *output.strides,
            cols // GROUP,
            MASKED=not output.whole,
            **output.constants,
            num_warps=8,
            maxnreg=_REGISTERS,
            enable_fp_fusion=False,
        )
    return output.operand()

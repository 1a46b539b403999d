"""The public functions: check the arguments, then call the reference or the Triton kernels.

All that quantize take bfloat16, float16 or float32, and a ``scale_format``: ``fp32``, or ``pow2``
for scales that are powers of two. They raise UnsupportedError for a wrong dtype, rank or scale
format. Codes are ``float8_e4m3fn``, ``scale_inv`` is float32, both without autograd. Operands have
two sides: ``rowwise`` and ``columnwise`` say which are made; the other is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import torch

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import reference
from fp8rl.numerics.formats import (
    BLOCK,
    GROUP,
    Operand,
    Quantized,
    Stacked,
    cdiv,
    check_codes,
    check_out,
    check_scale_shape,
    check_source,
)
from fp8rl.numerics.grouped import Addresses, ExpertRows, GroupedColumns, GroupedRows
from fp8rl.recipe import ScaleFormat


def implementation(x: torch.Tensor, kernels: str = "quantize") -> ModuleType:
    """The module that serves the device of ``x``.

    Args:
        x: tensor to quantize.
        kernels: file of :mod:`fp8rl.numerics.triton` with the function to call.

    Raises:
        UnsupportedError: ``x`` is on a GPU and triton is not installed.
    """
    if not x.is_cuda:
        return reference
    try:
        return import_module(f"fp8rl.numerics.triton.{kernels}")
    except ImportError as error:
        raise UnsupportedError(
            f"Quantizing on {x.device} needs triton ({error}); install the triton of your torch."
        ) from error


def quantize_block(
    w: torch.Tensor, block: tuple[int, int] = BLOCK, scale_format: ScaleFormat = "fp32"
) -> Quantized:
    """Quantize a weight in blocks.

    Args:
        w: ``[N, K]``, any strides. Partial blocks at the ends are padded with zeros.
        block: number of rows and columns of a block.
        scale_format: see the module.

    Returns:
        codes ``[N, K]`` contiguous, scale_inv ``[ceil(N/128), ceil(K/128)]``.
    """
    check_source(w, ndim=2, scale_format=scale_format)
    return implementation(w).quantize_block(w.detach(), block, scale_format)


def quantize_blocks(
    jobs: Sequence[tuple[torch.Tensor, Quantized]],
    block: tuple[int, int] = BLOCK,
    scale_format: ScaleFormat = "fp32",
    stacks: Sequence[Stacked] = (),
) -> None:
    """Apply :func:`quantize_block` to many weights, into given tensors, one launch for each shape.

    Args:
        jobs: pairs ``(w, out)``: a weight as for :func:`quantize_block`, and contiguous tensors to
            write to, all on one device; no two may write to the same memory.
        block: number of rows and columns of a block.
        scale_format: see the module.
        stacks: more weights on that device, with the stacks of matrices to write to.

    Raises:
        UnsupportedError: also for an ``out`` that does not fit; nothing is written then.
    """
    some = list(jobs)  # with one weight of each kind: a model has thousands of experts
    for weights, out, at in stacks:
        if len(at) != len(weights) or min(at) < 0 or max(at) >= min(map(len, out)):
            raise UnsupportedError(
                f"{len(weights)} weights cannot be written to the matrices {at} of a stack of "
                f"{min(map(len, out))}; give the number of a matrix for each weight."
            )
        kinds = {(w.shape, w.dtype, w.device): w for w in weights}
        first = Quantized(out.codes[0], out.scale_inv[0])
        some += [(w, first) for w in kinds.values()]
    for w, out in some:
        check_source(w, ndim=2, scale_format=scale_format)
        check_out(out, w, block)
    if some:
        kernels = implementation(some[0][0], "multi_tensor")
        kernels.quantize_blocks(jobs, block, scale_format, stacks)


def quantize_group(
    x: torch.Tensor, group: int = GROUP, scale_format: ScaleFormat = "fp32"
) -> Quantized:
    """Quantize activations or gradients in groups along the last dimension.

    Args:
        x: ``[..., K]``. A partial last group is padded with zeros.
        group: number of elements of a group.
        scale_format: see the module.

    Returns:
        codes ``[..., K]`` contiguous, scale_inv ``[..., ceil(K/group)]``.
    """
    check_source(x, ndim=None, scale_format=scale_format)
    return implementation(x).quantize_group(x.detach(), group, scale_format)


def quantize_operand(
    x: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operand:
    """Quantize an activation or gradient in 1x128 groups along both dimensions, in one read.

    Unlike :func:`quantize_group` it turns every infinity into a NaN code (0x7F), so that an
    overflow survives the product.

    Args:
        x: ``[N, K]``.
        scale_format: see the module.
        rowwise: make the codes in groups along K.
        columnwise: make the codes in groups along N.

    Returns:
        rowwise: codes ``[N, K']``, scale_inv ``[N, ceil(K/128)]``. columnwise: codes ``[K, N']``,
        scale_inv ``[K, ceil(N/128)]``. A GPU pads K' and N' to a multiple of 128 with zero codes,
        which add nothing to a product; elsewhere they are K and N. The strides of scale_inv depend
        on the implementation.
    """
    check_source(x, ndim=2, scale_format=scale_format)
    kernels = implementation(x, "dual")
    return kernels.quantize_operand(x.detach(), scale_format, rowwise, columnwise)


def quantize_weight(
    w: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operand:
    """Quantize a weight in 128x128 blocks and give its codes in both orders, in one read.

    Both sides hold the same codes and scales: those of :func:`quantize_block`, except that a
    non-finite weight gives a NaN code (0x7F).

    Returns:
        rowwise: codes ``[N, K']``, scale_inv ``[ceil(N/128), ceil(K/128)]``; columnwise: codes
        ``[K, N']``, scales transposed, on a CPU views of the others. K' and N' are as in
        :func:`quantize_operand`.
    """
    check_source(w, ndim=2, scale_format=scale_format)
    kernels = implementation(w, "dual")
    return kernels.quantize_weight(w.detach(), scale_format, rowwise, columnwise)


def row_alignment(device: torch.device) -> int:
    """Rows of a tile of one expert on this device: the alignment of :class:`ExpertRows`."""
    return implementation(torch.empty(0, device=device), "grouped").ALIGNMENT


def quantize_grouped(
    x: torch.Tensor,
    expert_rows: ExpertRows,
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[GroupedRows | None, GroupedColumns | None]:
    """Apply :func:`quantize_operand` to each expert's rows, in one launch.

    Args:
        x: ``[tokens, K]``, the rows of expert 0 first.
        expert_rows: which rows belong to which expert; its alignment is :func:`row_alignment` of
            the device. One that does not fit ``x`` is an UnsupportedError.
        scale_format: see the module.
        rowwise: make the codes in groups along K.
        columnwise: make the codes in groups along each expert's rows.

    Returns:
        Both sides. Each expert's part has the codes and scales of :func:`quantize_operand` on its
        rows alone; padded rows of the columnwise side are zeros.
    """
    check_source(x, ndim=2, scale_format=scale_format)
    kernels = implementation(x, "grouped")
    if expert_rows.tokens != len(x) or expert_rows.alignment != kernels.ALIGNMENT:
        raise UnsupportedError(
            f"{len(x)} rows on {x.device} do not fit expert_rows of {expert_rows.tokens} rows, "
            f"aligned to {expert_rows.alignment}; make them for this tensor with an alignment of "
            f"{kernels.ALIGNMENT}."
        )
    return kernels.quantize_grouped(x.detach(), expert_rows, scale_format, rowwise, columnwise)


def quantize_weights(
    weights: Sequence[torch.Tensor],
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    known: Addresses | None = None,
) -> Operand:
    """Apply :func:`quantize_weight` to the weights of many experts, into one stack.

    It takes one launch a side on a GPU.

    Args:
        weights: at least one weight ``[N, K]``, all of one shape, dtype and device; others are an
            UnsupportedError.
        scale_format: see the module.
        rowwise: make the codes ``[E, N, K]``.
        columnwise: make the codes ``[E, K, N]``.
        known: the addresses of the module's weights, which saves a GPU their copy in each call.

    Returns:
        rowwise: codes ``[E, N, K]``, scale_inv ``[E, ceil(N/128), ceil(K/128)]``; columnwise: both
        with the last two dimensions transposed, on a CPU as views.
    """
    if len({(w.shape, w.dtype, w.device) for w in weights}) != 1:
        shapes = sorted({f"{tuple(w.shape)} {w.dtype} on {w.device}" for w in weights})
        raise UnsupportedError(
            f"The weights of experts must have one shape, dtype and device, not {shapes}; quantize "
            "them one by one."
        )
    check_source(weights[0], ndim=2, scale_format=scale_format)
    kernels = implementation(weights[0], "grouped")
    with torch.no_grad():
        return kernels.quantize_weights(
            weights, scale_format, rowwise, columnwise, known or Addresses()
        )


def place_boundaries(y: torch.Tensor, expert_rows: ExpertRows) -> torch.Tensor:
    """Copy the rows of boundary tiles to their places in a grouped product.

    Args:
        y: ``[expert_rows.rows, N]``, contiguous, each tile the product with its expert's weight;
            changed in place.
        expert_rows: where each expert's rows lie.

    Returns:
        ``y`` itself, cut to ``[expert_rows.tokens, N]``. It is no view, since autograd refuses to
        change a view in place that a custom function returns; its memory stays as large as it was.

    Raises:
        UnsupportedError: ``y`` has another number of rows, or is not contiguous.
    """
    if y.ndim != 2 or len(y) != expert_rows.rows or not y.is_contiguous():
        raise UnsupportedError(
            f"A grouped product of shape {tuple(y.shape)} and strides {y.stride()} does not fit "
            f"{expert_rows.rows} rows; give a contiguous matrix with a row for each of the operand."
        )
    if expert_rows.boundaries and y.numel():
        implementation(y, "grouped").place_boundaries(y, expert_rows)
    return y.resize_(expert_rows.tokens, y.shape[1])


def quantize_swiglu(
    h: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operand:
    """Apply :func:`quantize_operand` to ``silu(gate) * up``.

    The activation is computed in float32 and rounded once to ``h``'s dtype before it is quantized.
    The codes are those of the two operations one after the other, up to the last bits of the
    exponential. On Hopper or later one kernel does both and never writes the activation to memory,
    if ``h`` is bfloat16, K a multiple of 128, and rows are contiguous and aligned to 8 bytes. For
    other K a GPU takes two kernels, the first with the bits of the rollout's.

    ``h`` is ``[N, 2 K]``, gate and up side by side, and the result that of ``[N, K]``. An odd width
    is an UnsupportedError.
    """
    _check_halves(h, scale_format)
    kernels = implementation(h, "swiglu")
    return kernels.quantize_swiglu(h.detach(), scale_format, rowwise, columnwise)


def quantize_swiglu_grad(
    grad: torch.Tensor,
    h: torch.Tensor,
    scale_format: ScaleFormat = "fp32",
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Operand:
    """Apply :func:`quantize_operand` to the gradient of ``h``; see :func:`quantize_swiglu`.

    ``grad`` is ``[N, K]`` of ``h``'s dtype, the gradient of ``silu(gate) * up``; the one kernel
    needs it contiguous. The result is that of ``[N, 2 K]``.
    """
    _check_halves(h, scale_format)
    if grad.shape != (h.shape[0], h.shape[1] // 2) or grad.dtype != h.dtype:
        raise UnsupportedError(
            f"The gradient of an activation of {tuple(h.shape)} {h.dtype} must be "
            f"{(h.shape[0], h.shape[1] // 2)} of that dtype, not {tuple(grad.shape)} {grad.dtype}."
        )
    kernels = implementation(h, "swiglu")
    return kernels.quantize_swiglu_grad(
        grad.detach(), h.detach(), scale_format, rowwise, columnwise
    )


def _check_halves(h: torch.Tensor, scale_format: ScaleFormat) -> None:
    check_source(h, ndim=2, scale_format=scale_format)
    if h.shape[1] % 2:
        raise UnsupportedError(
            f"A tensor of shape {tuple(h.shape)} has no halves of equal width, gate and up; give "
            "both side by side."
        )


def amax_into(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Raise each element of ``out`` to the amax of its tensor, if that is larger.

    On a GPU one launch serves three tensors; it does not synchronize, does not allocate and can be
    captured in a CUDA graph. Views whose rows are equally far apart are read in place.

    Args:
        out: float32 ``[len(tensors)]``, contiguous, without negative numbers. A tensor with a NaN
            gives NaN, and NaN stays NaN.
        tensors: floating point, any shapes and strides; an empty tensor changes nothing.
    """
    if out.dtype != torch.float32 or out.shape != (len(tensors),) or not out.is_contiguous():
        raise UnsupportedError(
            f"The amaxes of {len(tensors)} tensors need a contiguous float32 output of shape "
            f"({len(tensors)},), not {out.dtype} of {tuple(out.shape)}."
        )
    implementation(out, "amax").amax_into(out, tensors)


def dequantize_block(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = BLOCK,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Invert :func:`quantize_block`: ``codes * scale_inv`` in float32, cast to ``dtype``."""
    check_codes(codes, ndim=2)
    n, k = codes.shape
    check_scale_shape(scale_inv, (cdiv(n, block[0]), cdiv(k, block[1])))
    return reference.dequantize_block(codes, scale_inv, block, dtype)


def dequantize_group(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    group: int = GROUP,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Invert :func:`quantize_group`: ``codes * scale_inv`` in float32, cast to ``dtype``."""
    check_codes(codes, ndim=None)
    check_scale_shape(scale_inv, (*codes.shape[:-1], cdiv(codes.shape[-1], group)))
    return reference.dequantize_group(codes, scale_inv, group, dtype)


def fake_quantize_kv(
    k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, clipped: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round K and V to the values that attention over an FP8 KV cache computes with.

    The codes are ``x / scale`` in float32, saturated to 448 and rounded to E4M3, as vLLM's CUDA
    kernel writes them into its cache. The cache writer of vLLM's Triton attention divides
    approximately (``div.full``), which gives the same for powers of two, as all scales of
    :func:`fp8rl.kv_scales.scales_from_amax` are; with others a code next to a tie may differ.

    The result is ``code * scale``, computed in float32, rounded once to the dtype of ``x`` and
    limited to its largest finite number, which float16 can exceed. For bfloat16 that is exact where
    the scale is a power of two, and otherwise differs by at most 2**-8 of the value: attention
    kernels multiply the codes themselves and apply the scale to the product.

    On a GPU one launch reads and writes both once, without synchronizing. Rows that are equally far
    apart, as in a slice of a packed QKV projection, are read in place.

    Args:
        k: ``[.., head size]``, any strides.
        v: as ``k``; the shape may differ.
        scales: float32 ``[2]`` on their device, the scales of ``k`` and ``v``, contiguous.
        clipped: int64 ``[2]`` on their device, contiguous; the numbers of values of ``k`` and ``v``
            beyond 448 times their scale are added to it. NaN stays NaN and is not counted.

    Returns:
        Both as new contiguous tensors, without autograd.
    """
    for x in (k, v):
        check_source(x, ndim=None, scale_format="fp32")
    for name, x, dtype in (("scales", scales, torch.float32), ("clipped", clipped, torch.int64)):
        if x.dtype != dtype or x.shape != (2,) or not x.is_contiguous():
            raise UnsupportedError(
                f"'{name}' of K and V must be contiguous {dtype} of shape (2,), not {x.dtype} of "
                f"{tuple(x.shape)}."
            )
    return implementation(k, "kv_cache").fake_quantize_kv(k.detach(), v.detach(), scales, clipped)


def fake_quantize_int8_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round K and V to the values of an INT8 KV cache with a scale for each token and head.

    As vLLM's ``int8_per_token_head``: a row's scale is its largest magnitude over 127, at least
    1e-6, in float32, and a code is the integer next to ``x / scale``, of two that are as near the
    larger one. (vLLM's own kernel multiplies by the reciprocal and takes the one away from zero, so
    some 0.1% of its codes differ by one.) The result is ``code * scale`` in float32, rounded once
    to the dtype of ``x``, as in the 16-bit copy over which :mod:`vllm_fp8rl.attention.int8` attends
    in prompts; its kernel of decodes multiplies the codes themselves, which differs by at most
    2**-8 of a value in bfloat16.

    Arguments and result are as in :func:`fake_quantize_kv`; the last dimension is a row, and one
    with a value that is not finite becomes NaN.
    """
    for x in (k, v):
        check_source(x, ndim=None, scale_format="fp32")
    return implementation(k, "kv_cache").fake_quantize_int8_kv(k.detach(), v.detach())

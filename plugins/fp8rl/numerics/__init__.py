"""Block-wise FP8 (E4M3) quantization: one contract for trainer, refit and rollout.

In float32, ``scale = 448 / amax``, ``codes = clamp(x * scale, -448, 448)`` rounded to E4M3, and
``scale_inv = 1 / scale`` is what multiplies the codes back (DeepSeek-V3 technical report, section
3.3; the rounding order of vLLM's ``scaled_quantize`` and of transformers' ``Fp8Quantize``). A block
whose amax is zero, not finite, or so small that ``448 / amax`` overflows takes scale 1; there an
infinity saturates to 448 and a NaN stays NaN, sign kept. ``pow2`` rounds ``scale_inv`` up to a
power of two with an exponent in [-127, 127].

The functions here pick the implementation by the tensor's device: the torch reference on CPU, the
Triton kernels on a GPU. Both give the same codes and scales, bit for bit.
"""

from fp8rl.numerics._dispatch import (
    dequantize_block,
    dequantize_group,
    quantize_block,
    quantize_blocks,
    quantize_group,
    quantize_operand,
    quantize_segments,
    quantize_swiglu,
    quantize_swiglu_grad,
    quantize_weight,
    quantize_weights,
    row_alignment,
    unpad,
)
from fp8rl.numerics._finite import all_finite, parts, start_finite_check
from fp8rl.numerics._format import (
    BLOCK,
    E4M3_MAX,
    FP8_DTYPE,
    GROUP,
    PEAK_BINS,
    Operand,
    Quantized,
    cdiv,
)
from fp8rl.numerics._peaks import amax_into, count_peaks
from fp8rl.numerics._segments import ColumnSegments, RowSegments, Segments, on_device
from fp8rl.numerics.reference import mark_inf, peak_edges

__all__ = [
    "BLOCK",
    "E4M3_MAX",
    "FP8_DTYPE",
    "GROUP",
    "PEAK_BINS",
    "ColumnSegments",
    "Operand",
    "Quantized",
    "RowSegments",
    "Segments",
    "all_finite",
    "amax_into",
    "cdiv",
    "count_peaks",
    "dequantize_block",
    "dequantize_group",
    "mark_inf",
    "on_device",
    "parts",
    "peak_edges",
    "quantize_block",
    "quantize_blocks",
    "quantize_group",
    "quantize_operand",
    "quantize_segments",
    "quantize_swiglu",
    "quantize_swiglu_grad",
    "quantize_weight",
    "quantize_weights",
    "row_alignment",
    "start_finite_check",
    "unpad",
]

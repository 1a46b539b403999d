"""Block-wise FP8 (E4M3) quantization: one contract for trainer, refit and rollout.

In float32, ``scale = 448 / amax``, ``codes = clamp(x * scale, -448, 448)`` rounded to E4M3, and
``scale_inv = 1 / scale`` multiplies the codes back (DeepSeek-V3 technical report, section 3.3; the
rounding order of vLLM's ``scaled_quantize`` and of transformers' ``Fp8Quantize``). A block takes
scale 1 if its amax is zero, not finite, or so small that ``448 / amax`` overflows. In such a block
an infinity saturates to 448 and a NaN stays NaN; signs are kept. ``pow2`` rounds ``scale_inv`` up
to a power of two with an exponent in [-127, 127].

The functions pick the implementation by the tensor's device: the torch reference on a CPU, the
Triton kernels on a GPU. Both give the same codes and scales, bit for bit.
"""

from fp8rl.numerics.dispatch import (
    amax_into,
    dequantize_block,
    dequantize_group,
    fake_quantize_int8_kv,
    fake_quantize_kv,
    place_boundaries,
    quantize_block,
    quantize_blocks,
    quantize_group,
    quantize_grouped,
    quantize_operand,
    quantize_swiglu,
    quantize_swiglu_grad,
    quantize_weight,
    quantize_weights,
    row_alignment,
)
from fp8rl.numerics.finite import all_finite, parts, start_finite_check
from fp8rl.numerics.formats import (
    BLOCK,
    E4M3_MAX,
    FP8_DTYPE,
    GROUP,
    Operand,
    Quantized,
    Stacked,
    cdiv,
    whole_groups,
)
from fp8rl.numerics.grouped import (
    Addresses,
    ExpertRows,
    GroupedColumns,
    GroupedRows,
    LastExpertRows,
    on_device,
    stream_of,
)
from fp8rl.numerics.reference import mark_inf

__all__ = [
    "BLOCK",
    "E4M3_MAX",
    "FP8_DTYPE",
    "GROUP",
    "Addresses",
    "ExpertRows",
    "GroupedColumns",
    "GroupedRows",
    "LastExpertRows",
    "Operand",
    "Quantized",
    "Stacked",
    "all_finite",
    "amax_into",
    "cdiv",
    "dequantize_block",
    "dequantize_group",
    "fake_quantize_int8_kv",
    "fake_quantize_kv",
    "mark_inf",
    "on_device",
    "parts",
    "place_boundaries",
    "quantize_block",
    "quantize_blocks",
    "quantize_group",
    "quantize_grouped",
    "quantize_operand",
    "quantize_swiglu",
    "quantize_swiglu_grad",
    "quantize_weight",
    "quantize_weights",
    "row_alignment",
    "start_finite_check",
    "stream_of",
    "whole_groups",
]

"""Block-wise FP8 (E4M3) quantization: one contract for trainer, refit and rollout.

In float32, ``scale = 448 / amax``, ``codes = clamp(x * scale, -448, 448)`` rounded to E4M3, and
``scale_inv = 1 / scale`` multiplies the codes back (DeepSeek-V3 technical report, section 3.3; the
rounding order of vLLM's ``scaled_quantize`` and of transformers' ``Fp8Quantize``). A block takes
scale 1 if its amax is zero, not finite, or so small that ``448 / amax`` overflows. In such a block
an infinity saturates to 448 and a NaN stays NaN; signs are kept. ``pow2`` rounds ``scale_inv`` up
to a power of two with an exponent in [-127, 127].

The functions pick the implementation by the tensor's device: the torch reference on a CPU, the
Triton kernels on a GPU. Both give the same codes and scales, bit for bit.

======================= ==========================================================================
``dispatch``            the public functions: check the arguments, pick the implementation
``formats``             constants, the pair (codes, scale_inv), checks of shapes and dtypes
``reference``           the torch reference of everything
``grouped``             where the rows of each expert lie, and grouped operands
``amax``                running amaxes
``finite``              checks for NaN and infinities
``triton/quantize``     blocks and groups of one tensor; functions that all kernels share
``triton/multi_tensor`` many weights in one launch; the finite check
``triton/dual``         operands of a linear layer: codes along both dimensions in one read
``triton/packed``       the same for bfloat16, four values in a word
``triton/grouped``      operands of many experts in one launch
``triton/activations``  SiLU and product, or RMS norm, with the quantization of the result
``triton/swiglu``       SwiGLU and its gradient with the quantization of the result, both dimensions
``triton/amax``         running amaxes of q, k and v in one launch
``triton/kv_cache``     K and V as an FP8 KV cache holds them, in one launch
======================= ==========================================================================
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

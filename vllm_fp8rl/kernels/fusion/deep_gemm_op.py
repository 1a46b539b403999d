"""DeepGEMM as a custom operation that returns its result.

vLLM's operation writes into a tensor that it is given. With that one, and the views around it,
torch.compile takes longer to trace a linear layer (``docs/measurements/start.md``).
"""

from __future__ import annotations

import torch
from vllm.utils import deep_gemm


@torch.library.custom_op("fp8rl::deep_gemm", mutates_args=())
def multiply(
    codes: torch.Tensor,
    by_group: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    packs: bool,
) -> torch.Tensor:
    """Return ``x @ weight.T`` in bfloat16, the only dtype for which vLLM chooses DeepGEMM.

    Args:
        codes: ``x`` in FP8, ``[M, K]``.
        by_group: its scales ``[K/128, M padded to 4]``, as ``torch.ops.fp8rl.quantize`` makes them.
        weight: FP8 codes ``[N, K]``.
        weight_scale_inv: its scales ``[N/128, K/128]``.
        packs: whether DeepGEMM takes scales on this GPU as packed exponents.
    """
    scale_inv = by_group.t()[: codes.shape[0]]
    if packs:  # the scales of a row lie side by side
        scale_inv = scale_inv.contiguous()
    y = codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    deep_gemm.fp8_gemm_nt(
        (codes, scale_inv), (weight, weight_scale_inv), y, is_deep_gemm_e8m0_used=packs
    )
    return y


@multiply.register_fake
def _(
    codes: torch.Tensor,
    by_group: torch.Tensor,
    weight: torch.Tensor,
    weight_scale_inv: torch.Tensor,
    packs: bool,
) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], weight.shape[0]), dtype=torch.bfloat16)

"""What differs from one CPU to another."""

from __future__ import annotations

import torch


def kernels_round() -> bool:
    """Whether vLLM's CPU kernels round the float32 results that they store in BF16.

    Those for CPUs without AVX512-BF16 drop the lower half of the bits instead (vLLM's
    ``csrc/cpu/cpu_types_x86.hpp``), so that every second value is one bit smaller.
    """
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    gate_and_up = torch.tensor([[8.0] * 32 + [1.0] * 32], dtype=torch.bfloat16)
    out = torch.empty(1, 32, dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, gate_and_up)  # 7.9973
    return out.eq(8).all().item()


def attends_in_amx() -> bool:
    """Whether vLLM's attention of BF16 runs on AMX (``_get_attn_isa`` of its ``cpu_attn.py``)."""
    return torch.cpu._is_amx_tile_supported()


def few_rows_add_alike() -> bool:
    """Whether MKL sums a row beside 4 to 15 rows as beside more; with AVX-512 it does not."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 512, generator=generator) for n in (64, 256))
    whole = x @ w.t()
    return all(torch.equal(x[:rows] @ w.t(), whole[:rows]) for rows in range(4, 16))

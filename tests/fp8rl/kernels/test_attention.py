"""What the attention of ``exact`` refuses; its bits need a Hopper GPU (tests/gpu/test_exact.py)."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import UnsupportedError

attention = pytest.importorskip("fp8rl.kernels.attention", reason="needs Triton")


@pytest.mark.parametrize("page", [24, 48, 80])
def test_pages_that_tiles_would_overrun_are_refused(page: int) -> None:
    """vLLM takes every multiple of 16 as a block size."""
    cache = torch.zeros(2, page, 1, 64).to(torch.float8_e4m3fn)
    query, one = torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.ones(1)
    with pytest.raises(UnsupportedError, match=f"pages of 16 or multiples of 32 .* not of {page}"):
        attention.decode(
            query,
            cache,
            cache,
            torch.zeros(1, 1, dtype=torch.int32),
            torch.ones(1, dtype=torch.int32),
            softmax_scale=0.125,
            k_scale=one,
            v_scale=one,
            ones=attention.ones_like_codes(cache),
            out=query,
            splits=1,
        )

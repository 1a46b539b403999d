"""Where tests of Triton kernels run: on the GPU, or with ``TRITON_INTERPRET=1`` on the CPU.

Whoever imports this is skipped where there is neither, or no triton.
"""

from __future__ import annotations

import os

import pytest
import torch

from fp8rl.numerics import Quantized

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def assert_same(actual: Quantized | None, expected: Quantized | None) -> None:
    """The same to the bit, apart from zeros that may end a row of codes; or both are None."""
    if expected is None:
        assert actual is None
        return
    assert actual is not None
    assert actual.codes.dtype == torch.float8_e4m3fn
    assert actual.codes.is_contiguous()
    width = expected.codes.shape[-1]
    codes = actual.codes.view(torch.uint8).cpu()
    assert not codes[..., width:].any()
    for got, want in (
        (codes[..., :width], expected.codes.contiguous().view(torch.uint8)),
        (actual.scale_inv.cpu().view(torch.int32), expected.scale_inv.view(torch.int32)),
    ):
        assert got.shape == want.shape
        differing = (got != want).sum().item()
        assert differing == 0, f"{differing} of {want.numel()} differ"

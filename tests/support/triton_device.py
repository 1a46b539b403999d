"""Where tests of Triton kernels run: on the GPU, or with ``TRITON_INTERPRET=1`` on the CPU.

Whoever imports this is skipped where there is neither, or no triton.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

"""Skip the file that imports this where no kernels of Triton run (see :mod:`support.devices`)."""

from __future__ import annotations

import pytest

from support.devices import DEVICE as DEVICE
from support.devices import HAS_KERNELS
from support.devices import INTERPRETED as INTERPRETED

if not HAS_KERNELS:
    pytest.skip("needs a CUDA GPU, or TRITON_INTERPRET=1, and triton", allow_module_level=True)

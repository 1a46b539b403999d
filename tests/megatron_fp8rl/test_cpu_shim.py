"""The CPU shim: nothing of it stays behind, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo

OWNERS = (torch.cuda, torch.Tensor, mcore_random, moe_utils, WrappedTorchNorm)


def test_nothing_stays_behind_even_after_an_error():
    with CpuShim().active():
        pass  # imports submodules, which would look like additions
    before = [dict(vars(owner)) for owner in OWNERS]
    shim = CpuShim()
    with pytest.raises(ZeroDivisionError), shim.active(), shim.active():
        raise ZeroDivisionError
    assert [dict(vars(owner)) for owner in OWNERS] == before


def test_a_machine_with_cuda_and_a_group_of_another_size_are_refused(mcore, monkeypatch):
    group = torch.distributed.group.WORLD
    init_gloo()
    assert torch.distributed.group.WORLD is group
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(UnsupportedError, match=r"already has 2 process\(es\), not 1"):
            init_gloo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="without CUDA"):
        CpuShim()

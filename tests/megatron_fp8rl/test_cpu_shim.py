"""The CPU shim: what it maps, and that nothing of it stays behind."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import UnsupportedError
from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo


def _surface() -> dict[str, object]:
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    owners = (torch.cuda, torch.Tensor, mcore_random, moe_utils, WrappedTorchNorm)
    return {f"{owner!r}.{k}": v for owner in owners for k, v in vars(owner).items()}


def test_refuses_a_machine_with_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UnsupportedError, match="without CUDA"):
        CpuShim()


def test_nothing_stays_behind_even_after_an_error():
    with CpuShim().active():
        pass  # imports submodules, which would look like additions
    before = _surface()
    shim = CpuShim()
    with pytest.raises(ZeroDivisionError), shim.active(), shim.active():
        raise ZeroDivisionError
    after = _surface()
    assert {k for k in before.keys() | after.keys() if before.get(k) is not after.get(k)} == set()
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_init_gloo_keeps_a_group_and_refuses_one_of_another_size(mcore, monkeypatch):
    group = torch.distributed.group.WORLD
    init_gloo()
    assert torch.distributed.group.WORLD is group
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"already has 2 process\(es\), not 1"):
        init_gloo()

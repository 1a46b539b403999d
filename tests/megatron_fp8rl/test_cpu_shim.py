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


def test_a_region_maps_cuda_to_the_cpu():
    with CpuShim().active():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert (
            torch.ones(2, device=torch.device("cuda", 0)).cuda().to("cuda:0").device.type == "cpu"
        )
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64


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


def test_an_inner_region_leaves_the_outer_one_open():
    shim = CpuShim()
    with shim.active():
        with shim.active():
            pass
        with CpuShim().active():
            pass
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_rng_streams_of_the_tracker_differ_and_leave_the_default_stream_alone(mcore):
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    expected = torch.rand(4, generator=torch.Generator().set_state(torch.get_rng_state()))
    with tracker.fork():
        first = torch.rand(4)
    with tracker.fork():
        second = torch.rand(4)
    with tracker.fork("data-parallel-rng"):
        other = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other)


def test_norms_accept_sequence_parallel_and_are_tagged(mcore):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_cpu_initialization=True,
        persist_layer_norm=False,
    )
    norm = WrappedTorchNorm(config, 8)
    assert config.sequence_parallel
    assert [p.sequence_parallel for p in norm.parameters()] == [True, True]


def test_init_gloo_keeps_a_group_and_refuses_one_of_another_size(mcore):
    group = torch.distributed.group.WORLD
    init_gloo()
    assert torch.distributed.group.WORLD is group
    with pytest.raises(UnsupportedError, match="already has 1"):
        init_gloo(world_size=2)

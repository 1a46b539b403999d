"""One gloo process with megatron's parallel state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_fp8rl.testing.cpu_shim import CpuShim, init_gloo

SEED = 1234


@contextmanager
def _parallel_state(**sizes: int) -> Iterator[CpuShim]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    shim = CpuShim()
    ours = not torch.distributed.is_initialized()
    with shim.active():
        init_gloo()
        parallel_state.initialize_model_parallel(**sizes)
        model_parallel_cuda_manual_seed(SEED)
    try:
        yield shim
    finally:
        parallel_state.destroy_model_parallel()
        if ours:
            torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def megatron_world() -> Iterator[CpuShim]:
    """World size 1 with megatron's parallel state, for the tests of one module."""
    with _parallel_state() as shim:
        yield shim


@pytest.fixture
def mcore(megatron_world: CpuShim) -> Iterator[None]:
    """The test runs inside an open CPU region, from one seed."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with megatron_world.active():
        model_parallel_cuda_manual_seed(SEED)
        yield

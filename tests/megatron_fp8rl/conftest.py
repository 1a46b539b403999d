"""One gloo process with megatron's parallel state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("megatron.core")

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron_fp8rl.testing.cpu_shim import CpuShim
from support.megatron import SEED, one_process


@pytest.fixture(scope="module")
def megatron_world() -> Iterator[CpuShim]:
    """World size 1 with megatron's parallel state, for the tests of one module."""
    with one_process() as shim:
        yield shim


@pytest.fixture
def mcore(megatron_world: CpuShim) -> Iterator[None]:
    """The test runs inside an open CPU region, from one seed."""
    with megatron_world.active():
        model_parallel_cuda_manual_seed(SEED)
        yield

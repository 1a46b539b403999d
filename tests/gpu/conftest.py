"""Fixtures of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one dense shape, ``a`` and ``b``."""
    from support.gpu_engine import make_checkpoints

    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """Megatron's parallel state over GPU 0 alone."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_fp8rl.testing.local_spec import completed_local_spec

    torch.cuda.set_device(0)
    free_port = "tcp://127.0.0.1:0"
    torch.distributed.init_process_group("nccl", init_method=free_port, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    with completed_local_spec():  # routers without TransformerEngine
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one world of GPUs in the order of its results, so that each is told as it comes."""
    places = [n for n, i in enumerate(items) if i.path.name == "test_megatron_two_gpus.py"]
    if places:
        names = [name for world in items[places[0]].module.WORLDS for name in world]
        tests = [items[place] for place in places]
        tests.sort(key=lambda item: names.index(item.callspec.params["name"]))
        for place, item in zip(places, tests, strict=True):
            items[place] = item

"""What a refit of a live engine on a CPU needs besides the tensors: the peak of this process."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8rl import Recipe
from support.engine import Engine, make_checkpoint
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver.inventory import Inventory

LAYERS = 4


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, other_engine: Callable[..., Engine]) -> Engine:
    """An engine whose layers have 8 million weights each, so that a copy of one is seen."""
    shape = {"intermediate_size": 2048, "hidden_size": 1024, "num_hidden_layers": LAYERS}
    path = make_checkpoint(tmp_path_factory.mktemp("wide") / "model", 0, **shape)
    return other_engine(path, Recipe(), dtype="bfloat16", load_format="dummy")


def peak(work: Callable[[], object]) -> int:
    """Bytes by which the resident set rises above what it was before, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) << 10


def test_a_refit_needs_less_than_a_layer(wide):
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(entry.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        for name, entry in Inventory.of(wide.model).entries.items()
        if entry.required
    }
    layer = sum(t.nbytes for name, t in weights.items() if name.startswith("model.layers.0."))
    wide.model.load_weights(weights.items())
    wide.greedy([[5, 6, 7]], 1)  # what is kept from step to step exists now

    def by_refit() -> None:
        refit(wide.llm, weights.items(), expect_kv_scales=False)

    def by_a_copy() -> None:
        """The naive way to a refit that is whole or not at all: to gather it first."""
        gathered = {name: tensor.clone() for name, tensor in weights.items()}
        wide.model.load_weights(gathered.items())

    assert peak(by_refit) < layer
    assert peak(by_a_copy) > LAYERS * layer

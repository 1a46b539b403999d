"""Two gloo processes against one: losses, export, codes and KV scales do not depend on topology."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from support.cpu import few_rows_add_alike
from support.parallel import cases, promises
from support.parallel.promises import *  # noqa: F403  the tests
from support.parallel.run import SINGLES, TOPOLOGIES, random_weights
from support.processes import run_ranks

pytestmark = pytest.mark.slow
NAMES = [name for name in TOPOLOGIES if name != "tp2-bf16"]
"""On a CPU that one is the others together."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    promises.parametrize(metafunc, NAMES)


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    return {kind: random_weights(kind == "moe") for kind in ("dense", "moe")}


@pytest.fixture(scope="module")
def ranks(megatron_world, tmp_path_factory, weights) -> promises.Results:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the order of sums is part of the comparison
    try:
        with megatron_world.active(), cases.not_compiled():
            known = {name: [cases.train(run, weights[run.kind])] for name, run in SINGLES.items()}
    finally:
        torch.set_num_threads(threads)
    out = tmp_path_factory.mktemp("parallel")
    for kind, tensors in weights.items():
        save_file(tensors, out / f"{kind}.safetensors")
    arguments = out, json.dumps(dict.fromkeys(NAMES)), "cpu"
    run_ranks(cases.WORKER, 2, *arguments, timeout=180)
    return promises.Results(out, known=known)


@pytest.fixture
def same_bits(name: str) -> promises.SameBits:
    topology = TOPOLOGIES[name]
    # With EP an expert gets the rows of all ranks, and alone it may have few.
    loss = topology.tp == 1 and (topology.ep == 1 or few_rows_add_alike())
    return promises.SameBits(loss, "" if topology.tp == 1 else ".layers.0.")


@pytest.mark.parametrize("name", [name for name, run in TOPOLOGIES.items() if run.has_int8])
def test_the_loss_over_an_int8_cache_is_that_of_one_process(ranks, name):
    """Rows of K and V are heads, which no topology splits."""
    single = ranks.single(name)
    losses = [rank["int8"] for rank in ranks.of(name) if rank["int8"] is not None]
    assert len(losses) == (1 if TOPOLOGIES[name].pp > 1 else 2)
    # Where one of the two heads is not rounded, the loss moves by a fifth of this.
    rounding = abs(single["int8"] - single["losses"][0])
    assert rounding > 0
    for loss in losses:
        assert loss == pytest.approx(single["int8"], rel=0, abs=0.1 * rounding)
        if TOPOLOGIES[name].tp == 1:
            assert loss == single["int8"]

"""Two GPUs of one host against one: what tests/megatron_fp8rl/test_parallel.py asks of two
processes on a CPU, over NCCL and on FP8 tensor cores.

Models in BF16 run on DeepGEMM where it is installed, those in float32, which tell more, on
cuBLASLt and mixtures on Triton. All three backends add a 128-element group at a time, so topologies
differ by the order of float32 sums alone, as on a CPU: the tolerances are those of the CPU, where
``promises.LOSS_TOLERANCE`` says why FP8 codes make more of it than float32 would.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)
pytest.importorskip("megatron.core")
from safetensors.torch import save_file

from fp8rl.gemm import DeepGemmBackend, GemmShape, ScaledMmBackend
from support.launch import launch
from support.parallel import cases, promises
from support.parallel.promises import *  # noqa: F403  the tests
from support.parallel.run import SINGLES, TOPOLOGIES, random_weights
from support.processes import environment

DEVICE = "cuda"
TIMEOUT = 400.0  # of a world; what it has finished by then counts
# Worlds run side by side and each goes through its topologies in turn: most of their time is taken
# by imports and by compiling kernels, DeepGEMM's three seconds each for every shape of a matrix.
WORLDS = (
    ("single",),
    ("tp2", "tp2-sp", "vpp2", "dp2-overlap"),
    ("single-moe",),
    ("moe-ep2", "moe-tp2"),
    ("single-bf16",),
    ("tp2-bf16", "dp2-bf16"),
)
NAMES = tuple(name for world in WORLDS for name in world if name not in SINGLES)


def _backend(name: str) -> str:
    """One backend for every product of a topology, so that its figures can name it."""
    if DEVICE == "cpu":
        return "reference"
    topology = promises.topology_of(name)
    if topology.moe:
        return "triton"  # serves any number of tokens of an expert, in float32
    shape, gpu = GemmShape(64, 256, 256, topology.dtype), torch.device("cuda", 0)
    for backend in (DeepGemmBackend(), ScaledMmBackend()):
        if backend.supports(gpu, shape, "fp32") is None:
            return backend.name
    return "triton"


class Running(promises.Results):
    """Results as they come.

    Args:
        out: folder of the files.
        worlds: by topology, the world that goes through it.
    """

    def __init__(self, out: Path, worlds: dict[str, Future]) -> None:
        super().__init__(out)
        self._worlds = worlds

    def of(self, name: str) -> list[dict]:
        while not all(file.exists() for file in self.files(name)):
            if self._worlds[name].done():
                self._worlds[name].result()  # raises what ended it before this topology
                break
            time.sleep(0.1)
        return super().of(name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    promises.parametrize(metafunc, NAMES)


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    return {kind: random_weights(kind == "moe") for kind in ("dense", "moe")}


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory, weights):
    """The worlds of the topologies that are asked for start; nobody waits for them here."""
    out = tmp_path_factory.mktemp("parallel")
    for kind, tensors in weights.items():
        save_file(tensors, out / f"{kind}.safetensors")
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["name"] for item in items}
    asked |= {promises.single_name(name) for name in asked}

    def run(names: list[str]) -> None:
        launch(
            cases.WORKER,
            1 if names[0] in SINGLES else 2,
            [str(out), json.dumps({name: _backend(name) for name in names}), DEVICE],
            timeout=TIMEOUT,
            # What megatron asks for where it overlaps collectives with products.
            env=environment(CUDA_DEVICE_MAX_CONNECTIONS="1"),
        )

    worlds = [[name for name in world if name in asked] for world in WORLDS]
    with ThreadPoolExecutor(len(worlds)) as pool:
        started = [(names, pool.submit(run, names)) for names in worlds if names]
        yield Running(out, {name: future for names, future in started for name in names})


@pytest.fixture
def same_bits(name: str) -> promises.SameBits:
    """Told where every matrix product of a forward is one that the single process computes, too."""
    alike = TOPOLOGIES[name].tp == TOPOLOGIES[name].ep == 1
    return promises.SameBits(loss=alike, scales="" if alike else None)

"""Two GPUs of one host against one: what tests/megatron_fp8rl/test_parallel.py asks of two
processes on a CPU, over NCCL and on FP8 tensor cores.

Models in BF16 run on DeepGEMM where it is installed, those in float32, which tell more, on
cuBLASLt and mixtures on Triton. All three backends add a 128-element group at a time, so topologies
differ by the order of float32 sums alone, as on a CPU: the tolerances are those of the CPU, where
``parallel_checks.LOSS_TOLERANCE`` says why FP8 codes make more of it than float32 would.
"""

from __future__ import annotations

import json
import sys
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
from megatron_fp8rl.testing.launch import launch
from support.parallel import cases, checks
from support.parallel.run import SINGLES, TOPOLOGIES, random_weights
from support.processes import environment

DEVICE = "cuda"
TIMEOUT = 400.0  # of a world; what it has finished by then counts
# Worlds run side by side and each goes through its topologies in turn: most of their time is taken
# by imports and by compiling kernels, DeepGEMM's three seconds each for every shape of a matrix.
WORLDS = (
    ("single",),
    ("tp2", "tp2-sp", "pp2", "vpp2", "dp2", "dp2-overlap"),
    ("single-moe",),
    ("moe-ep2", "moe-tp2"),
    ("single-bf16",),
    ("tp2-bf16",),
    ("pp2-bf16", "dp2-bf16"),
)
NAMES = tuple(name for world in WORLDS for name in world if name not in SINGLES)
SINGLE_OF = {(topology.kind, topology.dtype): name for name, topology in SINGLES.items()}
each_topology = pytest.mark.parametrize("name", NAMES)


def _backend(name: str) -> str:
    """One backend for every product of a topology, so that its figures can name it."""
    if DEVICE == "cpu":
        return "reference"
    topology = checks.topology_of(name)
    if topology.moe:
        return "triton"  # serves any number of tokens of an expert, in float32
    shape, gpu = GemmShape(64, 256, 256, topology.dtype), torch.device("cuda", 0)
    for backend in (DeepGemmBackend(), ScaledMmBackend()):
        if backend.supports(gpu, shape, "fp32") is None:
            return backend.name
    return "triton"


class Running(checks.Results):
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
    asked |= {_single(name) for name in asked}

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


def _single(name: str) -> str:
    topology = checks.topology_of(name)
    return SINGLE_OF[topology.kind, topology.dtype]


def single(ranks: checks.Results, name: str) -> dict:
    return ranks.of(_single(name))[0]


def _same_products(name: str) -> bool:
    """Every matrix product of a forward is one that the single process computes, too."""
    return TOPOLOGIES[name].tp == TOPOLOGIES[name].ep == 1


@each_topology
def test_losses_equal_one_gpu(ranks, name, record_property, capsys):
    expected = single(ranks, name)["losses"]
    found = next(rank["losses"] for rank in reversed(ranks.of(name)) if rank["losses"])
    off = ", ".join(f"{abs(a / b - 1):.1e}" for a, b in zip(found, expected, strict=True))
    record_property(f"{name}, {_backend(name)}", off)
    with capsys.disabled():
        seconds = ranks.of(name)[0]["seconds"]
        sys.stdout.write(f"\n{name}, {_backend(name)}: {seconds:.0f} s; losses off by {off} ")
        sys.stdout.flush()
    checks.check_losses(name, ranks.of(name), expected, exact=_same_products(name))


@each_topology
def test_pins_follow_global_layer_numbers(ranks, name):
    checks.check_modules(name, ranks.of(name), single(ranks, name))


@each_topology
def test_export_equals_one_gpu_bit_for_bit(ranks, weights, name):
    checks.check_export(name, ranks.of(name), single(ranks, name), weights)


@pytest.mark.parametrize("name", ["tp2-sp"])
def test_gathering_codes_equals_gathering_activations_first_bit_for_bit(ranks, name):
    checks.check_gathered_codes(ranks.of(name))


@pytest.mark.parametrize("name", ["tp2", "vpp2"])
def test_untied_head_and_a_load_that_fails_on_every_rank(ranks, weights, name):
    checks.check_untied(ranks.of(name), weights)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("name", [*SINGLES, *NAMES])
def test_trainer_codes_equal_codes_of_the_exported_weights(ranks, name, scale_format):
    checks.check_codes(name, ranks.of(name), scale_format)


@each_topology
def test_kv_scales_equal_one_gpu(ranks, name):
    exact = "" if _same_products(name) else None
    checks.check_kv_scales(name, ranks.of(name), single(ranks, name), exact)


@each_topology
def test_clipped_keys_and_values_are_counted_over_all_ranks(ranks, name):
    checks.check_clipped(ranks.of(name), single(ranks, name))


@each_topology
def test_nan_on_one_rank_is_an_error_on_every_rank(ranks, name):
    checks.check_nan(ranks.of(name))


@pytest.mark.parametrize("name", ["dp2-bf16"])
@pytest.mark.parametrize("saved_with", ["from fp8", "from bf16"])
def test_checkpoints_of_the_distributed_optimizer_load_with_and_without_the_plugin(
    ranks, name, saved_with
):
    checks.check_checkpoints(ranks.of(name), saved_with)

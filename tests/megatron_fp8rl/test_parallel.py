"""Two gloo processes against one: losses, export, codes and KV scales do not depend on topology."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from support.cpu import few_rows_add_alike
from support.parallel import cases, checks
from support.parallel.run import SINGLES, TOPOLOGIES, random_weights
from support.processes import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights() -> dict[str, dict[str, torch.Tensor]]:
    return {kind: random_weights(kind == "moe") for kind in ("dense", "moe")}


@pytest.fixture(scope="module")
def single(megatron_world, weights) -> dict[tuple[bool, torch.dtype], dict]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the order of sums is part of the comparison
    try:
        with megatron_world.active(), cases.not_compiled():
            return {
                (run.moe, run.dtype): cases.train(run, weights[run.kind])
                for run in SINGLES.values()
            }
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, weights) -> checks.Results:
    out = tmp_path_factory.mktemp("parallel")
    for kind, tensors in weights.items():
        save_file(tensors, out / f"{kind}.safetensors")
    arguments = out, json.dumps(dict.fromkeys(TOPOLOGIES)), "cpu"
    run_ranks(cases.WORKER, 2, *arguments, timeout=180)
    return checks.Results(out)


def single_run(single, name: str) -> dict:
    topology = TOPOLOGIES[name]
    return single[topology.moe, topology.dtype]


each_topology = pytest.mark.parametrize("name", TOPOLOGIES)


@each_topology
def test_losses_equal_one_process(single, ranks, name):
    expected = single_run(single, name)["losses"]
    topology = TOPOLOGIES[name]
    # With EP an expert gets the rows of all ranks, and alone it may have few.
    exact = topology.tp == 1 and (topology.ep == 1 or few_rows_add_alike())
    checks.check_losses(name, ranks.of(name), expected, exact=exact)


@each_topology
def test_pins_follow_global_layer_numbers(single, ranks, name):
    checks.check_modules(name, ranks.of(name), single_run(single, name))


@each_topology
def test_export_equals_one_process_bit_for_bit(single, ranks, weights, name):
    checks.check_export(name, ranks.of(name), single_run(single, name), weights)


def test_gathering_codes_equals_gathering_activations_first_bit_for_bit(ranks):
    checks.check_gathered_codes(ranks.of("tp2-sp"))


@pytest.mark.parametrize("name", ["tp2", "vpp2"])
def test_untied_head_and_a_load_that_fails_on_every_rank(ranks, weights, name):
    checks.check_untied(ranks.of(name), weights)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("name", ["single", *TOPOLOGIES])
def test_trainer_codes_equal_codes_of_the_exported_weights(single, ranks, name, scale_format):
    both = [single[False, torch.float32]] if name == "single" else ranks.of(name)
    checks.check_codes(name, both, scale_format)


@each_topology
def test_kv_scales_equal_one_process(single, ranks, name):
    exact = "" if TOPOLOGIES[name].tp == 1 else ".layers.0."  # of all, or of the first layer
    checks.check_kv_scales(name, ranks.of(name), single_run(single, name), exact)


@each_topology
def test_clipped_keys_and_values_are_counted_over_all_ranks(single, ranks, name):
    checks.check_clipped(ranks.of(name), single_run(single, name))


@pytest.mark.parametrize("name", [name for name, run in TOPOLOGIES.items() if run.has_int8])
def test_the_loss_over_an_int8_cache_is_that_of_one_process(single, ranks, name):
    checks.check_int8(name, ranks.of(name), single_run(single, name))


@each_topology
def test_nan_on_one_rank_is_an_error_on_every_rank(ranks, name):
    checks.check_nan(ranks.of(name))


@pytest.mark.parametrize("saved_with", ["from fp8", "from bf16"])
def test_checkpoints_of_the_distributed_optimizer_load_with_and_without_the_plugin(
    ranks, saved_with
):
    checks.check_checkpoints(ranks.of("dp2-bf16"), saved_with)

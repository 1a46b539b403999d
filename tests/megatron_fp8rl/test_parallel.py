"""Two gloo processes against one: losses, export, codes and KV scales do not depend on topology."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fp8rl import PinPolicy, Recipe
from fp8rl.numerics import dequantize_block
from fp8rl.pinning import FUSED
from megatron_fp8rl import convert
from megatron_fp8rl.export import export_hf, fp8_wire
from megatron_fp8rl.testing.launch import LaunchError, launch

sys.path.insert(0, str(Path(__file__).parent))  # the worker is no test module and no package
import parallel_cases as cases

# Relative, one a step. Pipeline and data parallel forwards compute what one process does, bit for
# bit; tensor parallelism sums in another order. FP8 turns a relative difference e into one of about
# sqrt(e), by codes that flip, so runs part within a few steps: seen up to 4e-5, 5e-4, 1e-3 in
# float32. With FP8 switched off the losses would be off by 3e-4, 4e-3, 1e-2, with pins taken for
# stage-local numbers by 2e-4, 3e-3, 2e-3.
LOSS_TOLERANCE = {torch.float32: (2e-4, 2e-3, 1e-2), torch.bfloat16: (5e-3, 1e-2, 2e-2)}
SCALE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 5e-2}
FP8_MODULES = {
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 2, 3)
    for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
} - {"model.layers.3.mlp.down_proj"}
MOE_FP8_MODULES = {
    "model.layers.0.mlp.gate_up_proj",
    "model.layers.0.mlp.down_proj",
    *(f"model.layers.{n}.self_attn.{leaf}" for n in (0, 2, 3) for leaf in ("qkv_proj", "o_proj")),
    *(
        f"model.layers.2.mlp.experts.{expert}.{leaf}"
        for expert in range(cases.EXPERTS)
        for leaf in ("gate_up_proj", "down_proj")
    ),
}
Single = dict[tuple[bool, torch.dtype], dict]


@pytest.fixture(scope="module")
def weights(megatron_world) -> dict[str, dict[str, torch.Tensor]]:
    with megatron_world.active():
        return {
            kind: dict(export_hf(cases.build_gpt(cases.hf_config(moe=kind == "moe"), seed=5)))
            for kind in ("dense", "moe")
        }


@pytest.fixture(scope="module")
def single(megatron_world, weights) -> Single:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the order of sums is part of the comparison
    try:
        with megatron_world.active():
            runs = [cases.Topology(dtype=dtype) for dtype in LOSS_TOLERANCE]
            runs.append(cases.Topology(moe=True))
            return {
                (run.moe, run.dtype): cases.train(run, weights["moe" if run.moe else "dense"])
                for run in runs
            }
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, weights) -> list[dict]:
    out = tmp_path_factory.mktemp("parallel")
    for kind, tensors in weights.items():
        save_file(tensors, out / f"{kind}.safetensors")
    args = [str(out), json.dumps(list(cases.TOPOLOGIES))]
    launch(cases.__file__, 2, args, timeout=180)
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(2)]


def results(ranks: list[dict], name: str) -> tuple[cases.Topology, list[dict]]:
    return cases.TOPOLOGIES[name], [rank[name] for rank in ranks]


def single_run(single: Single, topology: cases.Topology) -> dict:
    return single[topology.moe, topology.dtype]


each_topology = pytest.mark.parametrize("name", cases.TOPOLOGIES)


@each_topology
def test_losses_equal_one_process(single, ranks, name):
    topology, both = results(ranks, name)
    expected = single_run(single, topology)["losses"]
    last_stages = [rank["losses"] for rank in both if rank["losses"]]
    assert len(last_stages) == (1 if topology.pp > 1 else 2)
    for losses in last_stages:
        for loss, truth, tolerance in zip(
            losses, expected, LOSS_TOLERANCE[topology.dtype], strict=True
        ):
            assert loss == pytest.approx(truth, rel=tolerance)
        if topology.tp == 1:
            assert losses[0] == expected[0]
    assert expected[-1] < expected[0]


@each_topology
def test_pins_follow_global_layer_numbers(single, ranks, name):
    topology, both = results(ranks, name)
    expected = MOE_FP8_MODULES if topology.moe else FP8_MODULES
    assert set(single_run(single, topology)["modules"]) == expected
    found = [set(rank["modules"]) for rank in both]
    assert found[0] | found[1] == expected
    if topology.pp > 1:
        assert not found[0] & found[1]
        layers = {int(module.split(".")[2]) for module in found[0]}
        assert layers == ({0, 2} if topology.vpp else {0})
    elif topology.ep > 1:
        assert {m for m in found[0] ^ found[1] if ".experts." not in m} == set()
        numbers = [{int(m.split(".")[5]) for m in part if ".experts." in m} for part in found]
        assert numbers == [{0, 1}, {2, 3}]
    else:
        assert found[0] == found[1]


@each_topology
def test_export_equals_one_process_bit_for_bit(single, ranks, weights, name):
    topology, both = results(ranks, name)
    for rank in both:
        assert list(rank["exported"]) == list(single_run(single, topology)["exported"])
        for tensor_name, tensor in rank["exported"].items():
            assert tensor.dtype == topology.dtype
            expected = weights["moe" if topology.moe else "dense"][tensor_name]
            assert torch.equal(tensor, expected.to(topology.dtype)), tensor_name
    for tensor_name, tensor in both[0]["trained"].items():
        assert torch.equal(tensor, both[1]["trained"][tensor_name]), tensor_name
        assert not torch.equal(tensor, both[0]["exported"][tensor_name]), tensor_name


def test_gathering_codes_equals_gathering_activations_first_bit_for_bit(ranks):
    for rank in ranks:
        bits = rank["tp2-sp"]["bits"]
        # dx is a sum over ranks either way, the other two are one product on the same codes.
        assert bits["same"] == [True, True, True]
        tokens = bits["tokens"]
        assert bits["sent"] == [("torch.uint8", tokens * 200), ("torch.float32", tokens * 2 * 4)]


@pytest.mark.parametrize("name", ["tp2", "vpp2"])
def test_untied_head_and_a_load_that_fails_on_every_rank(ranks, weights, name):
    _, both = results(ranks, name)
    head = weights["dense"]["model.embed_tokens.weight"].flip(0)
    expected = weights["dense"] | {"lm_head.weight": head}
    for rank in both:
        assert list(rank["untied"])[-1] == "lm_head.weight"
        assert sorted(rank["untied"]) == sorted(expected)
        for tensor_name, tensor in rank["untied"].items():
            assert torch.equal(tensor, expected[tensor_name].float()), tensor_name
        assert "missing, the first is 'model.layers.3.mlp.up_proj.weight'" in rank["untied_error"]


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("name", ["single", *cases.TOPOLOGIES])
def test_trainer_codes_equal_codes_of_the_exported_weights(single, ranks, name, scale_format):
    """After training: 100% of the codes and scales, against the whole HF matrix on one grid."""
    topology = cases.TOPOLOGIES.get(name, cases.SINGLE)
    both = [single_run(single, topology)] if name == "single" else results(ranks, name)[1]
    counts: dict[str, list[int]] = {}
    for rank in both:
        for module, (compared, wrong) in rank["codes"][scale_format].items():
            counts.setdefault(module, []).append(compared)
            assert wrong == 0, f"{module}: {wrong} of {compared}"
    parts = {
        f"{prefix}.{part}"
        for prefix, _, leaf in (
            module.rpartition(".") for module in (MOE_FP8_MODULES if topology.moe else FP8_MODULES)
        )
        for part in FUSED.get(leaf, (leaf,))
    }
    assert set(counts) == parts
    gate = 512 * 256 // topology.tp
    assert counts["model.layers.0.mlp.gate_proj"][0] == gate + gate // 128**2


@each_topology
@pytest.mark.parametrize("kind", ["scales", "percentiles"])
def test_kv_scales_equal_one_process(single, ranks, name, kind):
    topology, both = results(ranks, name)
    expected = single_run(single, topology)[kind]
    assert len(expected) == 3 * cases.LAYERS
    if kind == "percentiles":  # counted over the tokens and heads of all ranks
        largest = single_run(single, topology)["scales"]
        assert sum(expected[key] < largest[key] for key in expected) > len(expected) // 2
    for rank in both:
        assert set(rank[kind]) == set(expected)
        for scale_name, scale in rank[kind].items():
            exact = ".layers.0." in scale_name or topology.tp == 1
            tolerance = 0.0 if exact else SCALE_TOLERANCE[topology.dtype]
            if kind == "percentiles" and not exact:
                tolerance = 2 ** (1 / 16) - 1 + tolerance  # the next bin
            torch.testing.assert_close(scale, expected[scale_name], rtol=tolerance, atol=0.0)


@each_topology
def test_nan_on_one_rank_is_an_error_on_every_rank(ranks, name):
    for rank in results(ranks, name)[1]:
        assert rank["nan"].startswith("KV scale 'model.layers.2.self_attn.k_scale' is nan")


def test_fp8_wire_carries_the_trainers_codes(mcore, weights):
    model = cases.build(cases.SINGLE, weights["dense"])
    conversion = convert(model, Recipe.from_dict({"pins": cases.PINS}))
    plain = dict(export_hf(model, vocab_size=cases.VOCAB))
    wire = dict(fp8_wire(export_hf(model, vocab_size=cases.VOCAB), conversion.policy))
    scales = {n for n in wire if n.endswith("_scale_inv")}
    assert set(wire) - scales == set(plain)
    for module in conversion.modules.values():
        for name, held in cases.weight_codes_hf(module).items():
            assert torch.equal(wire[f"{name}.weight"].float(), held.codes.float())
            assert torch.equal(wire[f"{name}.weight_scale_inv"], held.scale_inv)
            scales.remove(f"{name}.weight_scale_inv")
            restored = dequantize_block(held.codes, held.scale_inv)
            worst = (restored - plain[f"{name}.weight"]).abs().max()
            assert worst <= plain[f"{name}.weight"].abs().max() / 16  # half a step of E4M3
    assert not scales
    unchanged = "model.layers.1.mlp.up_proj.weight"
    assert wire[unchanged] is not plain[unchanged] and torch.equal(
        wire[unchanged], plain[unchanged]
    )
    assert (
        PinPolicy.for_dense_model(conversion.policy.pins, 4).precision("model.layers.1.mlp.up_proj")
        == "bf16"
    )


def _script(tmp_path: Path, body: str) -> Path:
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys, time\nrank = os.environ['RANK']\n{body}\n")
    return script


def test_launch_returns_what_each_rank_printed(tmp_path):
    script = _script(tmp_path, "print(rank, os.environ['WORLD_SIZE'], sys.argv[1])")
    assert launch(script, 2, ["x"], timeout=30) == ["0 2 x\n", "1 2 x\n"]


def test_launch_tells_why_a_child_died_and_ends_the_others(tmp_path):
    pid = tmp_path / "pid"
    script = _script(
        tmp_path,
        f"if rank == '0':\n    open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)\n"
        f"while not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
        "raise ValueError('broken here')",
    )
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"(?s)rank 1 \(1\).*broken here"):
        launch(script, 2, timeout=30)
    assert time.monotonic() - began < 30
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_launch_ends_what_does_not_end(tmp_path):
    script = _script(tmp_path, "print('stuck', file=sys.stderr, flush=True); time.sleep(60)")
    with pytest.raises(LaunchError, match=r"did not end within 2 s; its stderr:\nstuck"):
        launch(script, 1, timeout=2)

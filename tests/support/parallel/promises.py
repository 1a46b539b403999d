"""What must hold between topologies: tests that a file for CPUs and one for GPUs import.

Such a file has fixtures ``weights``, ``ranks`` (:class:`Results`) and ``same_bits``
(:class:`SameBits` of the topology ``name``), and ``pytest_generate_tests``, which calls
:func:`parametrize` with its topologies.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fp8rl.models.families import FUSED
from support.parallel.run import EXPERTS, LAST_STAGES, LAYERS, SINGLES, TOPOLOGIES, Topology

# Relative, one a step. Pipeline and data parallel forwards compute what one process does, bit for
# bit; tensor parallelism sums in another order. FP8 turns a relative difference e into one of about
# sqrt(e), by codes that flip, so runs part within a few steps: seen on a CPU up to 5e-5, 6e-4, 2e-3
# in float32. With FP8 switched off the losses of a dense model would be off by 2e-4, 4e-3, 4e-3,
# with pins taken for stage-local numbers by 8e-4, 3e-4, 2e-3, those of a mixture by more than 9e-4
# in the first step.
LOSS_TOLERANCE = {torch.float32: (1.5e-4, 2e-3, 5e-3), torch.bfloat16: (5e-3, 1e-2, 2e-2)}
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
        for expert in range(EXPERTS)
        for leaf in ("gate_up_proj", "down_proj")
    ),
}
SINGLE_OF = {(topology.kind, topology.dtype): name for name, topology in SINGLES.items()}


class SameBits(NamedTuple):
    """What equals one process to the bit."""

    loss: bool
    """The first loss."""
    scales: str | None
    """KV scales with this part in their names; None for none."""


class Results:
    """What ranks wrote to ``out``; ``known``: results that need no file, by topology."""

    def __init__(self, out: Path, known: dict[str, list[dict[str, Any]]] | None = None) -> None:
        self._out, self._loaded = out, dict(known or {})

    def files(self, name: str) -> list[Path]:
        """One a rank; each appears when it is complete."""
        return [self._out / f"{name}.{rank}.pt" for rank in range(1 if name in SINGLES else 2)]

    def of(self, name: str) -> list[dict[str, Any]]:
        """One result a rank."""
        if name not in self._loaded:
            self._loaded[name] = [torch.load(f, weights_only=False) for f in self.files(name)]
        return self._loaded[name]

    def single(self, name: str) -> dict[str, Any]:
        """What one process found: the truth for a topology."""
        return self.of(single_name(name))[0]


def topology_of(name: str) -> Topology:
    return {**SINGLES, **TOPOLOGIES}[name]


def single_name(name: str) -> str:
    topology = topology_of(name)
    return SINGLE_OF[topology.kind, topology.dtype]


def parametrize(metafunc: pytest.Metafunc, names: Iterable[str]) -> None:
    """Give a test its topologies, unless it names them itself."""
    given = {mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")}
    if "name" in metafunc.fixturenames and "name" not in given:
        metafunc.parametrize("name", names)


def test_losses_equal_one_process(ranks, same_bits, name, record_property):
    topology = TOPOLOGIES[name]
    expected = ranks.single(name)["losses"]
    last_stages = [rank["losses"] for rank in ranks.of(name) if rank["losses"]]
    off = [f"{abs(a / b - 1):.1e}" for a, b in zip(last_stages[-1], expected, strict=True)]
    record_property(f"{name}, {ranks.of(name)[0]['backend']}", f"losses off by {', '.join(off)}")
    assert len(last_stages) == (1 if topology.pp > 1 else 2)
    for losses in last_stages:
        for loss, truth, tolerance in zip(
            losses, expected, LOSS_TOLERANCE[topology.dtype], strict=True
        ):
            assert loss == pytest.approx(truth, rel=tolerance)
        if same_bits.loss:
            assert losses[0] == expected[0]
    assert expected[-1] < expected[0]


def test_pins_follow_global_layer_numbers(ranks, name):
    topology, both = TOPOLOGIES[name], ranks.of(name)
    expected = MOE_FP8_MODULES if topology.moe else FP8_MODULES
    assert set(ranks.single(name)["modules"]) == expected
    found = [set(rank["modules"]) for rank in both]
    assert found[0] | found[1] == expected
    fused = sum(rank["fused"] for rank in both) // (1 if topology.pp > 1 else 2)
    assert fused == (2 if topology.dtype == torch.bfloat16 else 0)  # layers 0 and 2
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


def test_export_equals_one_process_bit_for_bit(ranks, weights, name):
    topology, both = TOPOLOGIES[name], ranks.of(name)
    for rank in both:
        assert list(rank["exported"]) == list(ranks.single(name)["exported"])
        for tensor_name, tensor in rank["exported"].items():
            assert tensor.dtype == topology.dtype
            expected = weights[topology.kind][tensor_name]
            assert torch.equal(tensor, expected.to(topology.dtype)), tensor_name
    for tensor_name, tensor in both[0]["trained"].items():
        assert torch.equal(tensor, both[1]["trained"][tensor_name]), tensor_name
        assert not torch.equal(tensor, both[0]["exported"][tensor_name]), tensor_name


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
def test_trainer_codes_equal_codes_of_the_exported_weights(ranks, name, scale_format):
    """After training: 100% of the codes and scales, against the whole HF matrix on one grid."""
    for run in (name, single_name(name)):
        topology = topology_of(run)
        counts: dict[str, list[int]] = {}
        for rank in ranks.of(run):
            for module, (compared, wrong) in rank["codes"][scale_format].items():
                counts.setdefault(module, []).append(compared)
                assert wrong == 0, f"{run}, {module}: {wrong} of {compared}"
        modules = MOE_FP8_MODULES if topology.moe else FP8_MODULES
        parts = {
            f"{prefix}.{part}"
            for prefix, _, leaf in (module.rpartition(".") for module in modules)
            for part in FUSED.get(leaf, (leaf,))
        }
        assert set(counts) == parts
        gate = 512 * 256 // topology.tp
        assert counts["model.layers.0.mlp.gate_proj"][0] == gate + gate // 128**2


def test_kv_scales_equal_one_process(ranks, same_bits, name):
    exact, tolerance = same_bits.scales, SCALE_TOLERANCE[TOPOLOGIES[name].dtype]
    expected = ranks.single(name)["amax"]
    assert len(expected) == 3 * LAYERS
    for rank in ranks.of(name):
        assert set(rank["amax"]) == set(expected)
        for scale_name, scale in rank["amax"].items():
            rtol = 0.0 if exact is not None and exact in scale_name else tolerance
            torch.testing.assert_close(scale, expected[scale_name], rtol=rtol, atol=0.0)


def test_clipped_keys_and_values_are_counted_over_all_ranks(ranks, name):
    """Attention over FP8 K and V from the second step on; every rank is told the same."""
    both, single = ranks.of(name), ranks.single(name)
    for rank in both:
        assert rank["clipped"] == both[0]["clipped"]
        assert set(rank["clipped"]) == {"k_clipped_share", "v_clipped_share"}
        for key, share in rank["clipped"].items():
            assert share > 0
            assert share == pytest.approx(single["clipped"][key], rel=0.1)


def test_nan_on_one_rank_is_an_error_on_every_rank(ranks, name):
    for rank in ranks.of(name):
        assert rank["nan"].startswith("KV scale 'model.layers.2.self_attn.k_scale' is nan")


def test_a_load_that_lacks_a_tensor_of_one_stage_fails_on_every_rank(ranks, name):
    for rank in ranks.of(name):
        assert f"missing, the first is '{LAST_STAGES}'" in rank.get("refused load", "no error")

"""What must hold between topologies, on CPUs and on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl.models.families import FUSED
from megatron_fp8rl.testing.launch import LaunchError
from support.parallel.run import EXPERTS, LAYERS, SINGLES, TOPOLOGIES, Topology

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


class Results:
    """What the ranks of one or more worlds wrote to ``out``.

    Args:
        out: folder of the files.
        error: how a world ended; told where a file is missing.
    """

    def __init__(self, out: Path, error: LaunchError | None = None) -> None:
        self._out, self._error = out, error
        self._loaded: dict[str, list[dict[str, Any]]] = {}

    def files(self, name: str) -> list[Path]:
        """One a rank; each appears when it is complete."""
        return [self._out / f"{name}.{rank}.pt" for rank in range(1 if name in SINGLES else 2)]

    def of(self, name: str) -> list[dict[str, Any]]:
        """One result a rank."""
        if name not in self._loaded:
            files = self.files(name)
            if self._error is not None and not all(file.exists() for file in files):
                raise self._error
            self._loaded[name] = [torch.load(file, weights_only=False) for file in files]
        return self._loaded[name]


def topology_of(name: str) -> Topology:
    return {**SINGLES, **TOPOLOGIES}[name]


def check_losses(name: str, both: list[dict], expected: list[float], *, exact: bool) -> None:
    """Args:
    exact: the first loss is the same to the bit.
    """
    topology = topology_of(name)
    last_stages = [rank["losses"] for rank in both if rank["losses"]]
    assert len(last_stages) == (1 if topology.pp > 1 else 2)
    for losses in last_stages:
        for loss, truth, tolerance in zip(
            losses, expected, LOSS_TOLERANCE[topology.dtype], strict=True
        ):
            assert loss == pytest.approx(truth, rel=tolerance)
        if exact:
            assert losses[0] == expected[0]
    assert expected[-1] < expected[0]


def check_modules(name: str, both: list[dict], single: dict) -> None:
    topology = topology_of(name)
    expected = MOE_FP8_MODULES if topology.moe else FP8_MODULES
    assert set(single["modules"]) == expected
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


def check_export(
    name: str, both: list[dict], single: dict, weights: dict[str, dict[str, torch.Tensor]]
) -> None:
    topology = topology_of(name)
    for rank in both:
        assert list(rank["exported"]) == list(single["exported"])
        for tensor_name, tensor in rank["exported"].items():
            assert tensor.dtype == topology.dtype
            expected = weights[topology.kind][tensor_name]
            assert torch.equal(tensor, expected.to(topology.dtype)), tensor_name
    for tensor_name, tensor in both[0]["trained"].items():
        assert torch.equal(tensor, both[1]["trained"][tensor_name]), tensor_name
        assert not torch.equal(tensor, both[0]["exported"][tensor_name]), tensor_name


def check_gathered_codes(both: list[dict]) -> None:
    for rank in both:
        bits = rank["bits"]
        # dx is a sum over ranks either way, the other two are one product on the same codes.
        assert bits["same"] == [True, True, True]
        tokens = bits["tokens"]
        assert bits["sent"] == [("torch.uint8", tokens * 200), ("torch.float32", tokens * 2 * 4)]


def check_untied(both: list[dict], weights: dict[str, dict[str, torch.Tensor]]) -> None:
    head = weights["dense"]["model.embed_tokens.weight"].flip(0)
    expected = weights["dense"] | {"lm_head.weight": head}
    for rank in both:
        assert list(rank["untied"])[-1] == "lm_head.weight"
        assert sorted(rank["untied"]) == sorted(expected)
        for tensor_name, tensor in rank["untied"].items():
            assert torch.equal(tensor, expected[tensor_name].float()), tensor_name
        assert "missing, the first is 'model.layers.3.mlp.up_proj.weight'" in rank["untied_error"]


def check_codes(name: str, both: list[dict], scale_format: str) -> None:
    """After training: 100% of the codes and scales, against the whole HF matrix on one grid."""
    topology = topology_of(name)
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


def check_kv_scales(name: str, both: list[dict], single: dict, exact: str | None) -> None:
    """Args:
    exact: part of the names of those that are the same to the bit; None for none.
    """
    topology = topology_of(name)
    expected = single["amax"]
    assert len(expected) == 3 * LAYERS
    for rank in both:
        assert set(rank["amax"]) == set(expected)
        for scale_name, scale in rank["amax"].items():
            tolerance = (
                0.0
                if exact is not None and exact in scale_name
                else SCALE_TOLERANCE[topology.dtype]
            )
            torch.testing.assert_close(scale, expected[scale_name], rtol=tolerance, atol=0.0)


def check_clipped(both: list[dict], single: dict) -> None:
    """Attention over FP8 K and V from the second step on; every rank is told the same."""
    for rank in both:
        assert rank["clipped"] == both[0]["clipped"]
        assert set(rank["clipped"]) == {"k_clipped_share", "v_clipped_share"}
        for key, share in rank["clipped"].items():
            assert share > 0
            assert share == pytest.approx(single["clipped"][key], rel=0.1)


def check_int8(name: str, both: list[dict], single: dict) -> None:
    """Rows of K and V are heads, which no topology splits, so the loss is that of one process."""
    losses = [rank["int8"] for rank in both if rank["int8"] is not None]
    assert len(losses) == (1 if topology_of(name).pp > 1 else 2)
    # Where one of the two heads is not rounded, the loss moves by a fifth of this.
    rounding = abs(single["int8"] - single["losses"][0])
    assert rounding > 0
    for loss in losses:
        assert loss == pytest.approx(single["int8"], rel=0, abs=0.1 * rounding)
        if topology_of(name).tp == 1:
            assert loss == single["int8"]


def check_nan(both: list[dict]) -> None:
    for rank in both:
        assert rank["nan"].startswith("KV scale 'model.layers.2.self_attn.k_scale' is nan")


def check_checkpoints(both: list[dict], saved_with: str) -> None:
    """One loaded in the other precision goes on as the run that saved it, changed over."""
    for rank in both:
        found = rank["checkpoints"][saved_with]
        for part in ("word_embeddings.weight", "linear_fc2.weight", "master ", "exp_avg "):
            assert any(part in name for name in found["different before"])
        assert found["different"] == []
        assert found["found"] == found["expected"]
        assert found["expected"] == both[0]["checkpoints"][saved_with]["expected"]
    assert (
        both[0]["checkpoints"]["from fp8"]["expected"]
        != both[0]["checkpoints"]["from bf16"]["expected"]
    )
    keys = found["keys"]
    assert keys == both[0]["checkpoints"]["from bf16"]["keys"]  # no trace of the plugin
    assert sum(key.startswith("optimizer.state.") for key in keys) == 3 * len(keys) // 4

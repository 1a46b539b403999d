"""Experts and multi-token-prediction layers in one process; test_parallel.py has two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from fp8rl.errors import PinError, UnsupportedError
from fp8rl.numerics import quantize_block
from megatron_fp8rl.export import export_hf, fp8_wire, load_hf
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import convert_alone, dense, losses, moe, pinned, weight_codes_hf
from support.numeric import same_codes

pytestmark = pytest.mark.usefixtures("mcore")

DENSE, EXPERTS = dense(), moe(3)
SHARED = {"moe_shared_expert_intermediate_size": 128, "moe_shared_expert_gate": True}


def _convert(model: Any, **pins: Any):
    return convert_alone(model, pinned(**pins))


def _losses(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(2 * 33).reshape(2, 33) % 61
    return losses(model, ids, loss_mask=torch.ones(2, 32))


# ---- grouped


class _GroupedLinear(torch.nn.Module):
    """As TransformerEngine's: weight0, weight1, .. and num_gemms."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.num_gemms = 3
        for i in range(3):
            weight = torch.randn(out_features, 128, dtype=torch.bfloat16)
            self.register_parameter(f"weight{i}", torch.nn.Parameter(weight))


def _with_grouped_experts():
    gpt = build_gpt(EXPERTS)
    for layer in gpt.decoder.layers:
        experts = layer.mlp.experts
        del experts.local_experts
        experts.linear_fc1, experts.linear_fc2 = _GroupedLinear(256), _GroupedLinear(128)
    return gpt


def test_grouped_experts_are_exported_under_each_experts_name():
    gpt = _with_grouped_experts()
    fc1 = gpt.decoder.layers[1].mlp.experts.linear_fc1
    exported = dict(export_hf(gpt))
    gate, up = fc1.weight2.chunk(2)
    assert torch.equal(exported["model.layers.1.mlp.experts.2.gate_proj.weight"], gate)
    assert torch.equal(exported["model.layers.1.mlp.experts.2.up_proj.weight"], up)
    sequential, again = build_gpt(EXPERTS, seed=4), _with_grouped_experts()
    load_hf(sequential, exported)  # the two kinds of experts are interchangeable
    load_hf(again, dict(export_hf(sequential)))
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), again.parameters(), strict=True))


def test_what_experts_refuse():
    gpt = _with_grouped_experts()
    with pytest.raises(PinError, match=r"experts\.1\.down_proj' but not all experts of the grou"):
        _convert(gpt, names=("*.0.mlp.experts.1.down_proj",))
    with pytest.raises(UnsupportedError, match=r"experts\.linear_fc1' is a _GroupedLinear"):
        _convert(gpt)
    _convert(gpt, kinds=("experts",)).close()  # pinned, they may be of any class
    legacy = build_gpt(EXPERTS)
    experts = legacy.decoder.layers[0].mlp.experts
    del experts.local_experts
    experts.weight1 = torch.nn.Parameter(torch.randn(128, 256))
    with pytest.raises(UnsupportedError, match="moe_use_legacy_grouped_gemm"):
        _convert(legacy)


# ---- a whole mixture


def test_routers_stay_bf16_and_codes_are_those_of_the_export(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "disable", True)  # the gate's sigmoid is compiled
    gpt = build_gpt(EXPERTS, **SHARED)
    bf16 = _losses(gpt)
    conversion = _convert(gpt, layers=(0,))
    rows = {row.name: row for row in conversion.policy.report()}
    assert rows["model.layers.1.mlp.gate"].reason == "always: router"
    assert "model.layers.1.mlp.shared_expert.gate_up_proj" in conversion.modules
    losses = _losses(gpt)
    assert 0 < (losses - bf16).abs().max() < 0.1
    losses.mean().backward()
    assert all(p.grad is not None for p in gpt.parameters())
    exported = dict(export_hf(gpt))
    wire = dict(fp8_wire(export_hf(gpt), conversion.policy))
    compared = set()
    for module in conversion.modules.values():
        for name, codes in weight_codes_hf(module).items():
            assert same_codes(codes, quantize_block(exported[f"{name}.weight"])), name
            assert torch.equal(wire[f"{name}.weight"].float(), codes.codes.float()), name
            compared.add(name)
    assert compared == {row.name for row in rows.values() if row.precision == "fp8"}
    assert "model.layers.1.mlp.shared_expert_gate.weight" in wire
    again = build_gpt(EXPERTS, seed=3, **SHARED)
    load_hf(again, exported)
    assert all(torch.equal(a, b) for a, b in zip(gpt.parameters(), again.parameters(), strict=True))


# ---- multi-token prediction


def test_mtp_layers_are_numbered_apart():
    gpt = build_gpt(EXPERTS, mtp_num_layers=2)
    bf16 = _losses(gpt)
    conversion = _convert(gpt, layers=(-1,), names=("mtp.layers.1.*",))
    fp8 = set(conversion.modules)
    assert {name.split(".mlp")[0].split(".self_attn")[0] for name in fp8} == {
        "model.layers.0",
        "mtp.layers.0",
        "mtp.layers.0.eh_proj",
    }
    assert conversion.policy.num_layers == 2
    assert type(gpt.mtp.layers[1].eh_proj) is ColumnParallelLinear
    losses = _losses(gpt)
    assert not torch.equal(losses, bf16)
    losses.mean().backward()
    assert gpt.mtp.layers[0].eh_proj.weight.grad.abs().max() > 0
    conversion.close()
    assert torch.equal(_losses(gpt), bf16)
    with pytest.raises(UnsupportedError, match="it also exports multi-token-prediction"):
        export_hf(gpt)

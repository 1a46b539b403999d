"""The doors of Megatron-LM and Megatron-Bridge, with megatron-core's own spec machinery."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec, import_module

from fp8rl import Recipe
from fp8rl.errors import PinError, RecipeError, UnsupportedError
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf, load_hf
from megatron_fp8rl.integrations import bridge, megatron_lm
from megatron_fp8rl.layers.swiglu import Fp8SwigluMLP
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import dense, losses, moe

pytestmark = pytest.mark.usefixtures("mcore")

DENSE = dense(num_hidden_layers=3)
EXPERTS = moe(4, num_hidden_layers=3, mlp_only_layers=[0])
PINS = {"layers": [-1], "names": ["model.layers.0.mlp.down_proj"]}
DENSE_FP8 = {
    f"model.layers.{layer}.{leaf}"
    for layer in (0, 1)
    for leaf in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
} - {"model.layers.0.mlp.down_proj"}


@pytest.fixture(autouse=True)
def recipe(monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("FP8RL_RECIPE", json.dumps({"pins": PINS}))
    return Recipe.from_dict({"pins": PINS})


def _symbol() -> ModuleSpec:
    """Resolve ``--spec megatron_fp8rl.integrations.megatron_lm gpt_layer`` as gpt_builder does."""
    return import_module(("megatron_fp8rl.integrations.megatron_lm", "gpt_layer"))


def _build(hf_config: Any, spec: Any, **options: Any):
    return build_gpt(hf_config, transformer_layer_spec=spec, transformer_impl="local", **options)


def _loss(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(2 * 17).reshape(2, 17) % 64
    return losses(model, ids).float().mean()


@pytest.mark.parametrize("hf_config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_model_of_the_spec_is_a_converted_model(hf_config, recipe, capsys):
    plain = build_gpt(hf_config)
    ours = _build(hf_config, _symbol())
    load_hf(ours, dict(export_hf(plain)))
    bf16 = _loss(plain)
    expected = convert(plain, recipe)
    found = conversion_of(ours)
    assert set(found.modules) == set(expected.modules)
    assert found.policy.report() == expected.policy.report()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(ours.sharded_state_dict()) == list(plain.sharded_state_dict())
    loss = _loss(ours)
    assert torch.equal(loss, _loss(plain)) and not torch.equal(loss, bf16)
    loss.backward()
    pinned = ours.decoder.layers[2]
    assert type(pinned.self_attention.linear_qkv) is ColumnParallelLinear
    assert type(pinned.self_attention.linear_proj) is RowParallelLinear
    if hf_config is DENSE:
        assert set(found.modules) == DENSE_FP8
    found.close()
    assert torch.equal(_loss(ours), bf16)
    with pytest.raises(UnsupportedError, match="No module of this model was converted"):
        conversion_of(ours)
    again = convert(ours, Recipe())  # what the converter resolved is gone, its pins too
    assert conversion_of(ours).policy.pins == again.policy.pins != found.policy.pins


def test_the_table_of_the_whole_model_is_printed_once(capsys):
    spec = ModuleSpec(
        module=megatron_lm.Fp8TransformerLayer,
        params={"fp8": megatron_lm.SpecConverter()},
    )
    parts = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    first = [
        _build(
            DENSE,
            spec,
            num_layers=4,
            vp_stage=stage,
            pre_process=stage == 0,
            post_process=False,
            **parts,
        )
        for stage in range(2)
    ]
    printed = capsys.readouterr().out
    assert printed.count("fp8rl [rank 0]") == 1
    assert "layers 3: BF16 qkv_proj (layers: -1), o_proj (layers: -1)" in printed
    # This rank has layers 0 and 2 of 4, each the first of its chunk; the table has the whole model.
    found = conversion_of(first)
    assert {int(name.split(".")[2]) for name in found.modules} == {0, 2}


def test_mtp_layers_stay_bf16_behind_the_symbol_and_the_table_says_so():
    model = _build(DENSE, _symbol(), mtp_num_layers=1)
    row = conversion_of(model).policy.row("mtp.layers.0.self_attn.o_proj")
    assert (row.precision, row.reason) == ("bf16", "names: mtp.*")
    kinds = {type(m) for m in model.mtp.modules()}
    assert ColumnParallelLinear in kinds and megatron_lm.Fp8TransformerLayer not in kinds


def test_models_of_one_spec_and_one_config_are_apart():
    """A policy and its reference: closing one must not leave stale codes in the other."""
    spec, config = _symbol(), build_gpt(DENSE, bias_activation_fusion=True).config
    sizes: dict[str, Any] = {"vocab_size": 64, "max_sequence_length": 32}
    one, two = (GPTModel(config, spec, position_embedding_type="rope", **sizes) for _ in range(2))
    fused = [layer.mlp for layer in two.decoder.layers[:2]]
    # One of the linears of the first is pinned.
    assert [type(mlp) is Fp8SwigluMLP for mlp in fused] == [False, True]
    conversion_of(one).close()
    assert type(fused[1]) is Fp8SwigluMLP
    assert type(one.decoder.layers[1].mlp) is not Fp8SwigluMLP
    found = conversion_of(two)
    assert set(found.modules) == DENSE_FP8
    module = found.modules["model.layers.1.mlp.down_proj"]
    before = module.fp8_setup.epoch.value
    module.weight.grad = torch.ones_like(module.weight)
    torch.optim.SGD([module.weight], lr=1.0).step()
    assert module.fp8_setup.epoch.value > before


@pytest.mark.parametrize(
    ("recipe_of_the_user", "error", "message"),
    [
        ('{"pins": {"layers": [9]}}', PinError, "9 matches nothing"),
        ('{"exact": true}', UnsupportedError, r"exact is served by convert\(model, recipe\)"),
        ('{"pin": {}}', RecipeError, "unknown key"),
        ('{"training": false}', UnsupportedError, "No module of this model was converted"),
    ],
)
def test_recipes_that_the_symbol_refuses(monkeypatch, recipe_of_the_user, error, message):
    monkeypatch.setenv("FP8RL_RECIPE", recipe_of_the_user)
    with pytest.raises(error, match=message):
        conversion_of(_build(DENSE, _symbol()))


def test_other_layers_engines_and_a_missing_bridge_are_named(monkeypatch):
    with pytest.raises(UnsupportedError, match="transformer_impl='transformer_engine'"):
        build_gpt(DENSE, transformer_layer_spec=_symbol(), transformer_impl="transformer_engine")
    for name in ("megatron.bridge", "megatron.bridge.models.conversion.param_mapping"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="Megatron-Bridge cannot be imported"):
        bridge.pre_wrap_hook()([build_gpt(DENSE)])

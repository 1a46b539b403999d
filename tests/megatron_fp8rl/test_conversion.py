"""Converting a whole GPT: what changes, what does not, and that it trains."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import Float16Module
from torch.distributed.fsdp import fully_shard

from fp8rl import PinPolicy, PluginManager, Recipe, hookimpl
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import Quantized, quantize_block
from fp8rl.recipe import Pins
from megatron_fp8rl import conversion as conversion_module
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.layers.linear import Fp8ColumnParallelLinear, Fp8Module, Fp8RowParallelLinear
from megatron_fp8rl.layers.linear_modules import sites
from megatron_fp8rl.testing.models import build_gpt
from support.megatron import (
    Recording,
    Trainer,
    convert_alone,
    dense,
    kept,
    losses,
    pinned,
    quantized_weights,
    tokens,
    weight_codes_hf,
)
from support.numeric import same_codes

pytestmark = pytest.mark.usefixtures("mcore")

LINEARS = {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}


def _gpt(head_dim: int = 64, *, dtype=torch.bfloat16, layers: int = 2, tied=False, **overrides):
    config = dense(
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        tie_word_embeddings=tied,
    )
    return build_gpt(config, dtype=dtype, **overrides)


# ---- what changes, and what does not


def test_names_shapes_and_checkpoint_keys_stay():
    gpt = _gpt()
    model = Float16Module(gpt.config, gpt)

    def outside() -> tuple:
        sharded = gpt.sharded_state_dict()
        return (
            [(n, p.shape, p.dtype, p.data_ptr()) for n, p in model.named_parameters()],
            list(model.state_dict()),
            {k: (getattr(v, "global_shape", None), getattr(v, "global_offset", None))
             for k, v in sharded.items()},
            [n for n, _ in model.named_modules()],
        )  # fmt: skip

    before = outside()
    conversion = convert_alone(model)
    assert outside() == before
    expected = {f"model.layers.{layer}.{leaf}" for layer in range(2) for leaf in LINEARS}
    assert set(conversion.modules) == expected
    assert type(gpt.output_layer) is ColumnParallelLinear


def test_pins_are_global_under_virtual_pipeline_stages():
    chunks = _chunks()
    assert [len(chunk.decoder.layers) for chunk in chunks] == [1, 1]
    # The first pipeline rank holds layers 0 and 2; both are number 0 of their chunk.
    conversion = convert_alone(chunks, pinned(layers=(-2,)))
    assert set(conversion.modules) == {f"model.layers.0.{leaf}" for leaf in LINEARS}
    assert conversion.policy.num_layers == 4
    # A pin on a layer of another rank alone is no error here.
    conversion.close()
    conversion = convert_alone(chunks, pinned(layers=(3,), names=("*.1.mlp.down_proj",)))
    assert len(conversion.modules) == 8
    conversion.close()
    # One that no rank has is, whatever the rank.
    for pins in ({"layers": (-5,)}, {"names": ("*.4.mlp.down_proj",)}, {"kinds": ("experts",)}):
        with pytest.raises(PinError, match="match"):
            convert_alone(chunks, pinned(**pins))
    assert not any(isinstance(m, Fp8Module) for chunk in chunks for m in chunk.modules())


def test_the_table_is_true_of_every_module_and_tells_of_lost_pins(tmp_path):
    """Class and storage of each weight, against its row."""
    gpt = _gpt(layers=4)
    pins = {"first": 1, "last": 1, "names": ("model.layers.1.mlp.down_proj",)}
    conversion = convert_alone(gpt, pinned(**pins))
    rows = {row.name: row.precision for row in conversion.policy.report()}
    checked = set()
    for site in sites([gpt]):
        fp8 = type(site.module) in (Fp8ColumnParallelLinear, Fp8RowParallelLinear)
        assert fp8 or type(site.module) in (ColumnParallelLinear, RowParallelLinear)
        assert site.module.weight.dtype == torch.bfloat16  # codes are beside it, never instead
        for part in site.layout.parts:
            name = f"{site.name.rpartition('.')[0]}.{part}"
            assert rows[name] == ("fp8" if fp8 else "bf16"), name
            checked.add(name)
    others = {"lm_head", "embed_tokens", "norm"}
    assert checked == {r.name for r in conversion.policy.report() if r.kind not in others}
    assert {rows[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {"bf16"}

    naive = PinPolicy(Pins(first=1, last=1), ModelSpec.dense(2).names)
    assert all(row.precision == "bf16" for row in naive.report())  # two stages of two layers


def test_pins_of_plugins_join_those_of_the_recipe():
    class Plugin:
        @hookimpl
        def register_pins(self, module_names):
            assert "model.layers.1.mlp.gate_proj" in module_names
            return Pins(kinds=("o_proj",))

    plugins = PluginManager(discover=False)
    plugins.register(Plugin())
    conversion = convert(_gpt(), pinned(first=1), plugins=plugins)
    assert {n.rpartition(".")[2] for n in conversion.modules} == {
        "qkv_proj",
        "gate_up_proj",
        "down_proj",
    }
    assert all(name.startswith("model.layers.1.") for name in conversion.modules)


def test_an_mlp_without_a_gate_has_an_up_proj():
    gpt = _gpt(gated_linear_unit=False, activation_func=torch.nn.functional.gelu)
    conversion = convert_alone(gpt, pinned(names=("model.layers.0.mlp.up_proj",)))
    assert "model.layers.1.mlp.up_proj" in conversion.modules
    assert "model.layers.0.mlp.up_proj" not in conversion.modules
    assert list(weight_codes_hf(conversion.modules["model.layers.1.mlp.up_proj"])) == [
        "model.layers.1.mlp.up_proj"
    ]


def test_training_in_bf16_converts_nothing():
    gpt = _gpt()
    conversion = convert_alone(gpt, Recipe(training=False, pins=Pins(last=1)))
    assert not conversion.modules
    assert not any(isinstance(m, Fp8Module) for m in gpt.modules())
    assert conversion.policy.bf16_linears()[0] == "model.layers.1.self_attn.q_proj"
    conversion.invalidate()
    conversion.close()


def test_modules_whose_rows_share_blocks_are_told(caplog):
    with caplog.at_level(logging.WARNING, logger="megatron_fp8rl"):
        convert_alone(_gpt(head_dim=32), pinned(names=("*.0.self_attn.*",)))
    assert "size: model.layers.1.self_attn.qkv_proj (k_proj 64, v_proj 64)." in caplog.text


# ---- several handles of one model


def test_converting_twice_is_an_error_with_other_pins_too():
    """No module is asked for twice then, so a check of each module would pass."""
    gpt, ids = _gpt(), tokens(batch=4)
    conversion = convert_alone(gpt, pinned(last=1))
    before, modules = losses(gpt, ids), dict(conversion.modules)
    for second in (pinned(first=1), Recipe(training=False)):
        with pytest.raises(UnsupportedError, match=r"linear_\w+' runs in FP8 already; close\(\)"):
            convert_alone(gpt, second)
    assert torch.equal(losses(gpt, ids), before) and conversion.modules == modules


def test_a_handle_says_that_another_has_closed_its_conversion(tmp_path):
    """The naive handle's list of modules is stale, and its close() breaks a later conversion."""
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)
    one = convert_alone(gpt)
    assert not torch.equal(losses(gpt, ids), bf16)
    conversion_of(gpt).close()
    assert torch.equal(losses(gpt, ids), bf16)
    for call in (
        lambda: one.modules,
        one.invalidate,
        one.drop_codes,
        lambda: one.keeping_codes().__enter__(),
    ):
        with pytest.raises(UnsupportedError, match=r"handle of a conversion is closed: .*; use"):
            call()
    with pytest.raises(UnsupportedError, match="No module of this model was converted"):
        conversion_of(gpt)

    later = convert_alone(gpt, pinned(first=1))
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\..*' was converted again after"):
        one.close()
    assert all(isinstance(module, Fp8Module) for module in later.modules.values())
    later.close()
    one.close()  # nothing is left to do; that is no error
    assert torch.equal(losses(gpt, ids), bf16)


def _chunks() -> list[Any]:
    """Layers 0 and 2 of 4, as the first of two pipeline ranks holds them."""
    return [
        _gpt(
            layers=4,
            pipeline_model_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            vp_stage=stage,
            pre_process=stage == 0,
            post_process=False,
        )
        for stage in range(2)
    ]


def test_chunks_that_handles_share():
    first, second = chunks = _chunks()
    whole = convert_alone(chunks)
    part = conversion_of(first)
    assert set(part.modules) == {name for name in whole.modules if ".0." in name}
    part.close()
    with pytest.raises(UnsupportedError, match="were converted, or given back"):
        _ = whole.modules
    with pytest.raises(UnsupportedError, match="runs in FP8 already"):
        convert_alone(chunks)  # the second is; the first must stay as it is
    assert not any(isinstance(m, Fp8Module) for m in first.modules())
    whole.close()  # what is left of it
    assert not any(isinstance(m, Fp8Module) for m in second.modules())
    for pins in ({"first": 1}, {"kinds": ("o_proj",)}):  # of the first chunk: all, or some
        convert_alone(first, pinned(**pins))
        convert_alone(second, pinned(last=1))
        with pytest.raises(UnsupportedError, match="converted with another recipe than the rest"):
            conversion_of(chunks)
        conversion_of(second).close()
        if "kinds" in pins:
            conversion_of(first).close()


@pytest.mark.parametrize("calls", [0, 20])
def test_an_interrupt_leaves_a_model_that_can_be_converted(calls, monkeypatch):
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)
    can_fuse = conversion_module.can_fuse
    left = [calls]  # each module is looked at once, when the linears have changed

    def interrupted(module: Any) -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return can_fuse(module)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(conversion_module, "can_fuse", interrupted)
        convert_alone(gpt)
    assert not any(isinstance(m, Fp8Module) for m in gpt.modules())
    assert torch.equal(losses(gpt, ids), bf16)
    assert len(convert_alone(gpt).modules) == 8


# ---- codes


def test_kept_codes_notice_loaded_weights_and_invalidate():
    gpt, other = _gpt(seed=1), _gpt(seed=2)
    ids = tokens(batch=4)
    conversion = convert_alone(gpt)
    convert_alone(other)
    expected = losses(other, ids)
    with conversion.keeping_codes():
        assert not torch.equal(losses(gpt, ids), expected)
        gpt.load_state_dict(other.state_dict())
        assert torch.equal(losses(gpt, ids), expected)
        for model in (gpt, other):
            for parameter in model.parameters():
                parameter.data.mul_(2)  # leaves no trace
        expected = losses(other, ids)
        assert not torch.equal(losses(gpt, ids), expected)
        conversion.invalidate()
        assert torch.equal(losses(gpt, ids), expected)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every weight that is quantized from now on, in order."""
    return quantized_weights(monkeypatch)


FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.mark.parametrize(
    ("recompute", "launches"),
    [({}, 8), (FULL, 16)],  # the first forward of a recomputed layer does not know of its backward
    ids=["plain", "recomputed"],
)
def test_codes_are_made_once_for_all_micro_batches_that_keep_them(recompute, launches, quantized):
    batches = [tokens(seed, batch=4) for seed in range(3)]
    plain, keeping = (Trainer(_gpt(**options), fp8={}) for options in ({}, recompute))
    expected = plain.gradients(*batches)
    once = len(quantized)
    assert once >= 3 * 2 * 8
    with keeping.conversion.keeping_codes():
        assert keeping.gradients(*batches) == expected
        assert len(quantized) - once == launches
        weights = {n.removesuffix(".weight"): t for n, t in export_hf(keeping.ddp)}
        truth = quantize_block(weights["model.layers.0.mlp.down_proj"])
        rowwise, columnwise = kept(keeping.conversion.modules["model.layers.0.mlp.down_proj"])
        assert same_codes(rowwise, truth)
        assert same_codes(columnwise, Quantized(*(t.t().contiguous() for t in truth)))
    for one, other in zip(plain.ddp.parameters(), keeping.ddp.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)
    assert not any(map(kept, keeping.conversion.modules.values()))


def test_an_optimizer_step_while_codes_are_kept_makes_them_anew(quantized):
    """As in a batch of several steps; naively the second goes on with the codes of the first."""
    batches = [tokens(seed, batch=4) for seed in range(2)]
    plain, keeping = (Trainer(_gpt(), fp8={}, distributed=True) for _ in range(2))
    expected = [plain.step(*batches) for _ in range(2)]
    quantized.clear()
    with keeping.conversion.keeping_codes():
        assert [keeping.step(*batches) for _ in range(2)] == expected
    assert len(quantized) == 2 * 8 and expected[0] != expected[1]


def test_nothing_is_kept_after_an_error():
    gpt = _gpt()
    conversion = convert_alone(gpt)
    with pytest.raises(ZeroDivisionError), conversion.keeping_codes():
        losses(gpt, tokens())
        assert any(map(kept, conversion.modules.values()))
        raise ZeroDivisionError
    assert not any(map(kept, conversion.modules.values()))


def test_codes_that_a_handle_of_a_part_has_left_are_not_used_again():
    """Chunks that were converted together keep codes together; a handle of one frees its own."""
    chunks = _chunks()
    convert_alone(chunks)
    part = conversion_of(chunks[0])
    linear: Any = conversion_of(chunks[1]).modules["model.layers.2.mlp.down_proj"]
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    with part.keeping_codes():
        before, _ = linear(x)
    linear.weight.data.mul_(-1)
    with part.keeping_codes():
        assert torch.equal(linear(x)[0], -before)


def test_a_conversion_may_end_while_codes_are_kept():
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)
    conversion = convert_alone(gpt)
    (epoch,) = {module.fp8_setup.epoch for module in conversion.modules.values()}
    with conversion.keeping_codes():
        losses(gpt, ids)
        conversion.close()
    assert torch.equal(losses(gpt, ids), bf16)
    assert not epoch.kept and not epoch.keep


# ---- training


def test_a_backend_of_a_plugin_is_used_for_all_three_products():
    own = Recording()

    class Plugin:
        @hookimpl
        def register_gemm_backends(self):
            return [own]

    plugins = PluginManager(discover=False)
    plugins.register(Plugin())
    gpt = _gpt()
    convert(gpt, Recipe(), plugins=plugins)
    losses(gpt, tokens(batch=4)).mean().backward()
    assert sorted(own.calls) == ["dgrad"] * 8 + ["fprop"] * 8 + ["wgrad"] * 8


@pytest.mark.parametrize("converted", ["before", "after"])
def test_torchs_fsdp_in_one_process_gives_the_same_losses(converted):
    """Megatron-FSDP, which owns gradients, is refused; this one leaves them to autograd."""

    def run(shard: bool) -> list[float]:
        gpt = _gpt()
        if converted == "before":
            convert_alone(gpt)
        if shard:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            for layer in gpt.decoder.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(gpt, mesh=mesh)
        if converted == "after":
            convert_alone(gpt)
        optimizer = torch.optim.SGD(gpt.parameters(), lr=0.5)
        curve = []
        for _ in range(3):
            loss = losses(gpt, tokens(batch=4)).float().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        return curve

    sharded = run(True)
    assert sharded == run(False) and sharded[1] < sharded[0]

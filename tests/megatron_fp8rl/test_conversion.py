"""Converting a whole GPT: what changes, what does not, and that it trains."""

from __future__ import annotations

import logging
from contextlib import nullcontext
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
from megatron_fp8rl import Conversion, conversion_of, convert, weight_codes_hf
from megatron_fp8rl import conversion as conversion_module
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


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_shapes_and_checkpoint_keys_stay(wrapped):
    gpt = _gpt()
    model = Float16Module(gpt.config, gpt) if wrapped else gpt

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
    assert {name.split(".", 3)[3] for name in conversion.modules} == LINEARS
    assert len(conversion.modules) == 8
    kinds = {"qkv_proj": Fp8ColumnParallelLinear, "down_proj": Fp8RowParallelLinear}
    for leaf, kind in kinds.items():
        found = [type(m) for name, m in conversion.modules.items() if name.endswith(leaf)]
        assert found == [kind, kind]
    assert type(gpt.output_layer) is ColumnParallelLinear


@pytest.mark.parametrize(
    ("pins", "bf16"),
    [
        ({"layers": (-1,)}, {f"model.layers.2.{leaf}" for leaf in LINEARS}),
        ({"first": 1, "last": 1}, {f"model.layers.{n}.{leaf}" for n in (0, 2) for leaf in LINEARS}),
        ({"names": ("*.1.mlp.down_proj",)}, {"model.layers.1.mlp.down_proj"}),
        ({"kinds": ("qkv_proj",)}, {f"model.layers.{n}.self_attn.qkv_proj" for n in range(3)}),
    ],
)
def test_pinned_modules_keep_their_exact_class(pins, bf16):
    gpt = _gpt(layers=3)
    conversion = convert_alone(gpt, pinned(**pins))
    every = {f"model.layers.{n}.{leaf}" for n in range(3) for leaf in LINEARS}
    assert set(conversion.modules) == every - bf16
    upstream = [
        m for m in gpt.decoder.modules() if type(m) in (ColumnParallelLinear, RowParallelLinear)
    ]
    assert len(upstream) == len(bf16)
    assert not any(isinstance(m, Fp8Module) for m in upstream)


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
    conversion = convert_alone(
        gpt, pinned(first=1, last=1, names=("model.layers.1.mlp.down_proj",))
    )
    rows = {row.name: row.precision for row in conversion.policy.report()}
    checked = set()
    for site in sites([gpt]):
        fp8 = type(site.module) in (Fp8ColumnParallelLinear, Fp8RowParallelLinear)
        assert fp8 or type(site.module) in (ColumnParallelLinear, RowParallelLinear)
        assert site.module.weight.dtype == torch.bfloat16  # codes are beside it, never instead
        codes = weight_codes_hf(site.module).values() if fp8 else ()
        assert all(held.codes.dtype == torch.float8_e4m3fn for held in codes)
        for part in site.layout.parts:
            name = f"{site.name.rpartition('.')[0]}.{part}"
            assert rows[name] == ("fp8" if fp8 else "bf16"), name
            checked.add(name)
    others = {"lm_head", "embed_tokens", "norm"}
    assert checked == {r.name for r in conversion.policy.report() if r.kind not in others}
    assert {rows[name] for name in ("model.embed_tokens", "model.norm", "lm_head")} == {"bf16"}

    naive = PinPolicy(
        Pins(first=1, last=1), ModelSpec.dense(2).names
    )  # two stages of two layers: all
    assert all(row.precision == "bf16" for row in naive.report())


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


def test_the_table_is_logged_once_with_a_warning_about_ragged_widths(caplog):
    with caplog.at_level(logging.INFO, logger="megatron_fp8rl"):
        convert_alone(_gpt(head_dim=64), pinned(first=1))

    def ours() -> list[logging.LogRecord]:  # megatron has warnings of its own
        return [r for r in caplog.records if r.name.startswith("megatron_fp8rl")]

    assert [r.levelname for r in ours()] == ["INFO"]
    assert "layers 0: BF16 qkv_proj (first: 1), o_proj (first: 1)" in caplog.text
    assert "layers 1: FP8 qkv_proj, o_proj, gate_up_proj, down_proj" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatron_fp8rl"):
        convert_alone(_gpt(head_dim=32), pinned(names=("*.0.self_attn.*",)))
    (record,) = ours()
    assert "model.layers.1.self_attn.qkv_proj (k_proj 64, v_proj 64)" in record.getMessage()
    assert "layers.0" not in record.getMessage()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatron_fp8rl"):
        convert_alone(_gpt(head_dim=32), pinned())
    (record,) = ours()
    assert (
        "size: model.layers.{0-1}.self_attn.qkv_proj (k_proj 64, v_proj 64)." in record.getMessage()
    )


# ---- several handles of one model


def _assert_closed(handle: Conversion, folder: Any) -> None:
    for call in (
        lambda: handle.modules,
        handle.invalidate,
        handle.drop_codes,
        lambda: handle.keeping_codes().__enter__(),
        lambda: handle.save_table(folder),
    ):
        with pytest.raises(UnsupportedError, match=r"handle of a conversion is closed: .*; use"):
            call()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("recipe", ["same", "other pins", "bf16"])
def test_converting_twice_is_an_error_whatever_the_second_recipe(recipe):
    """With other pins no module is asked for twice, so a check of each module would pass."""
    gpt, ids = _gpt(), tokens(batch=4)
    conversion = convert_alone(gpt, pinned(last=1))
    before = losses(gpt, ids)
    modules = dict(conversion.modules)
    assert not set(modules) & {f"model.layers.1.{leaf}" for leaf in LINEARS}
    second = {
        "same": pinned(last=1),
        "other pins": pinned(first=1),
        "bf16": Recipe(training=False),
    }[recipe]
    with pytest.raises(UnsupportedError, match=r"linear_\w+' runs in FP8 already; close\(\)"):
        convert_alone(gpt, second)
    assert torch.equal(losses(gpt, ids), before)
    assert conversion.modules == modules
    conversion.close()


def test_a_handle_says_that_another_has_closed_its_conversion(tmp_path):
    """The naive handle's list of modules is stale, and its close() breaks a later conversion."""
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)
    one = convert_alone(gpt)
    assert not torch.equal(losses(gpt, ids), bf16)
    two = conversion_of(gpt)
    assert one.modules == two.modules
    two.close()
    assert torch.equal(losses(gpt, ids), bf16)
    _assert_closed(one, tmp_path)
    _assert_closed(two, tmp_path)
    with pytest.raises(UnsupportedError, match="No module of this model was converted"):
        conversion_of(gpt)

    later = convert_alone(gpt, pinned(first=1))
    fp8, modules = losses(gpt, ids), dict(later.modules)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\..*' was converted again after"):
        one.close()
    _assert_closed(one, tmp_path)
    assert torch.equal(losses(gpt, ids), fp8) and later.modules == modules
    for handle in (later, one, two):  # nothing is left to do for the last two; that is no error
        handle.close()
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


@pytest.mark.parametrize("scale_format", ["fp32", "pow2"])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_codes_are_those_of_the_exported_weights(head_dim, scale_format):
    recipe = Recipe.from_dict({"weights": {"scale_format": scale_format}})
    gpt = _gpt(head_dim)
    conversion = convert_alone(gpt, recipe)
    exported = {n.removesuffix(".weight"): t for n, t in export_hf(gpt)}
    seen = 0
    for module in conversion.modules.values():
        for name, codes in weight_codes_hf(module).items():
            if name.endswith("qkv_proj"):  # head_dim 32: k and v are half a block
                assert head_dim == 32
                prefix = name.removesuffix("qkv_proj")
                weight = torch.cat([exported[f"{prefix}{x}_proj"] for x in "qkv"])
            else:
                weight = exported[name]
            assert same_codes(codes, quantize_block(weight, scale_format=scale_format)), name
            seen += 1
    assert seen == 2 * (5 if head_dim == 32 else 7)


@pytest.mark.parametrize("keep", [False, True])
def test_loading_weights_is_noticed_and_data_writes_after_invalidate(keep):
    gpt, other = _gpt(seed=1), _gpt(seed=2)
    ids = tokens(batch=4)
    conversion = convert_alone(gpt)
    reference = convert_alone(other)
    expected = losses(other, ids)
    with conversion.keeping_codes() if keep else nullcontext():
        assert not torch.equal(losses(gpt, ids), expected)
        gpt.load_state_dict(other.state_dict())
        assert torch.equal(losses(gpt, ids), expected)

        doubled = {n: p.detach() * 2 for n, p in other.named_parameters()}
        for model in (gpt, other):
            for name, parameter in model.named_parameters():
                parameter.data.copy_(doubled[name])
        reference.drop_codes()
        expected = losses(other, ids)
        if keep:
            assert not torch.equal(losses(gpt, ids), expected)
            conversion.invalidate()
        assert torch.equal(losses(gpt, ids), expected)


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Every weight that is quantized from now on, in order."""
    return quantized_weights(monkeypatch)


def _kept(conversion: Conversion) -> list[Quantized]:
    """All codes that are in memory, of both sides."""
    return [side for module in conversion.modules.values() for side in kept(module)]


@pytest.mark.parametrize(
    ("recompute", "launches"),
    [
        ({}, 8),  # both sides in one
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            16,  # the first forward of a layer does not know of its backward
        ),
    ],
    ids=["plain", "recomputed"],
)
def test_codes_are_made_once_for_all_micro_batches_that_keep_them(recompute, launches, quantized):
    batches = [tokens(seed, batch=4) for seed in range(3)]
    plain, keeping = (Trainer(_gpt(**recompute), fp8={}) for _ in range(2))
    expected = plain.gradients(*batches)
    once = len(quantized)
    assert once >= 3 * 2 * 8
    with keeping.conversion.keeping_codes():
        assert keeping.gradients(*batches) == expected
        assert len(quantized) - once == launches
        of = keeping.conversion.modules["model.layers.0.mlp.down_proj"]
        weights = {n.removesuffix(".weight"): t for n, t in export_hf(keeping.ddp)}
        truth = quantize_block(weights["model.layers.0.mlp.down_proj"])
        rowwise, columnwise = kept(of)
        assert same_codes(rowwise, truth)
        assert same_codes(columnwise, Quantized(*(t.t().contiguous() for t in truth)))
    for one, other in zip(plain.ddp.parameters(), keeping.ddp.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)
    assert not _kept(keeping.conversion)


@pytest.mark.parametrize("distributed", [False, True])
def test_an_optimizer_step_while_codes_are_kept_makes_them_anew(distributed, quantized):
    """As in a batch of several steps; naively the second goes on with the codes of the first."""
    batches = [tokens(seed, batch=4) for seed in range(2)]
    plain, keeping = (Trainer(_gpt(), fp8={}, distributed=distributed) for _ in range(2))
    expected = [plain.step(*batches) for _ in range(3)]
    quantized.clear()
    with keeping.conversion.keeping_codes():
        assert [keeping.step(*batches) for _ in range(3)] == expected
    assert len(quantized) == 3 * 8
    assert len({loss for loss, _ in expected}) == 3


def test_nothing_is_kept_after_codes_were():
    gpt, other = _gpt(seed=1), _gpt(seed=2)
    ids = tokens(batch=4)
    conversion = convert_alone(gpt)
    convert_alone(other)

    class Stop(Exception):
        pass

    with pytest.raises(Stop), conversion.keeping_codes():
        before = losses(gpt, ids)
        assert _kept(conversion)
        raise Stop
    assert not _kept(conversion)
    expected = losses(other, ids)
    assert not torch.equal(before, expected)
    for mine, theirs in zip(gpt.parameters(), other.parameters(), strict=True):
        mine.data.copy_(theirs.data)  # leaves no trace
    assert torch.equal(losses(gpt, ids), expected)
    with conversion.keeping_codes():
        assert torch.equal(losses(gpt, ids), expected)


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


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ],
    ids=["selective", "full"],
)
def test_recompute_gives_the_same_losses_and_gradients(recompute):
    def run(**overrides: Any) -> tuple[list[float], torch.Tensor]:
        trainer = Trainer(_gpt(**overrides), fp8={})
        losses = [trainer.step(tokens(0, batch=4), tokens(1, batch=4))[0] for _ in range(2)]
        return losses, torch.cat([p.main_grad.flatten() for p in trainer.ddp.parameters()])

    (plain, grads), (recomputed, regrads) = run(), run(**recompute)
    assert recomputed == plain
    assert torch.equal(regrads, grads)


@pytest.mark.parametrize(("overlap", "flag"), [(False, False), (True, True)])
def test_gradients_are_added_to_the_buffers_of_ddp(overlap, flag):
    batches = [tokens(seed, batch=4) for seed in range(3)]
    trainer = Trainer(_gpt(), fp8={}, overlap_grad_reduce=overlap, grad_reduce_in_fp32=True)
    for module in trainer.conversion.modules.values():
        module.gradient_accumulation_fusion = flag
    trainer.gradients(*batches)
    added = {n: p.main_grad.clone() for n, p in trainer.ddp.named_parameters()}

    gpt = _gpt()
    convert_alone(gpt)
    total = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in gpt.named_parameters()}
    for batch in batches:
        (losses(gpt, batch).float().mean() / len(batches)).backward()
        for name, parameter in gpt.named_parameters():
            total[name] += parameter.grad.float()  # rounded to bfloat16 before it is added
            parameter.grad = None
    differ = []
    for name, grad in total.items():
        got = added[f"module.module.{name}"]
        assert (got - grad).norm() / grad.norm() < 2**-8, name
        differ += [] if torch.equal(got, grad) else [name]
    assert any("linear_" in name for name in differ)


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

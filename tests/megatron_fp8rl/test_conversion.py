"""Converting a whole GPT: what changes, what does not, and that it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import Float16Module
from torch.distributed.fsdp import fully_shard

from fp8rl import PluginManager, Recipe, hookimpl
from fp8rl.errors import PinError, UnsupportedError
from fp8rl.numerics import Quantized, quantize_block
from megatron_fp8rl import conversion as conversion_module
from megatron_fp8rl import conversion_of, convert
from megatron_fp8rl.export import export_hf
from megatron_fp8rl.layers.linear import Fp8Module
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


# ---- several handles of one model


def test_a_handle_says_that_another_has_closed_its_conversion(tmp_path):
    """The naive handle's list of modules is stale, and its close() breaks a later conversion."""
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)
    one = convert_alone(gpt)
    assert not torch.equal(losses(gpt, ids), bf16)
    conversion_of(gpt).close()
    assert torch.equal(losses(gpt, ids), bf16)
    for call in (lambda: one.modules, one.drop_codes):
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


def test_an_interrupt_leaves_a_model_that_can_be_converted(monkeypatch):
    gpt, ids = _gpt(), tokens(batch=4)
    bf16 = losses(gpt, ids)

    def interrupted(module: Any) -> bool:  # is asked when the linears have changed
        raise KeyboardInterrupt

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


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


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


def test_torchs_fsdp_in_one_process_gives_the_same_losses():
    """Megatron-FSDP, which owns gradients, is refused; this one leaves them to autograd."""

    def run(shard: bool) -> list[float]:
        gpt = _gpt()
        convert_alone(gpt)
        if shard:
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            for module in (*gpt.decoder.layers, gpt):
                fully_shard(module, mesh=mesh)
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

"""Loads by the routes of the inventory against vLLM's own walk: same storage, same errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.models.utils import AutoWeightsLoader

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import quantize_block
from support.engine import SCALES, Engine, same_bits, same_state
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.receiver import inventory as inventory_module
from vllm_fp8rl.refit.receiver.inventory import Inventory
from vllm_fp8rl.storage.block_grid import BlockGrid, WriteBatch, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight


@pytest.fixture(scope="module")
def a(a: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return a | SCALES


@pytest.fixture(scope="module")
def b(b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return b | {n: t * 2 for n, t in SCALES.items()}


@pytest.fixture
def inventory(engine: Engine, a: dict[str, torch.Tensor]):
    """The engine's inventory; the engine has the weights of ``a`` before and after."""
    refit(engine.llm, a.items(), expect_kv_scales=True)
    yield Inventory.of(engine.model)
    refit(engine.llm, a.items(), expect_kv_scales=True)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def walked(engine: Engine, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """By vLLM, as everything that comes as a generator."""
    return engine.model.load_weights(item for item in tensors)


class Walks:
    """Counts how often vLLM's loader walks the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        walk = AutoWeightsLoader._load_module

        def counting(loader, prefix, module, weights):
            self.count += prefix == "" and module is loader.module
            return walk(loader, prefix, module, weights)

        monkeypatch.setattr(AutoWeightsLoader, "_load_module", counting)


def test_a_name_without_a_route_is_left_to_vllm(engine, a, b, inventory, monkeypatch):
    """As of a layer whose loader is the model's own: in a refit and in a plain load."""
    walks, norm = Walks(monkeypatch), engine.model.model.norm.weight
    norm.weight_loader = lambda param, tensor: param.data.copy_(2 * tensor)
    try:
        state_of(engine.model).inventory = None
        assert not Inventory.of(engine.model).routes(["model.norm.weight"])
        for load in (
            lambda: refit(engine.llm, b.items(), expect_kv_scales=True),
            lambda: engine.model.load_weights(list(b.items())),
        ):
            walked(engine, a.items())
            before = walks.count
            load()
            assert walks.count > before
            assert torch.equal(norm.data, 2 * b["model.norm.weight"].float())
    finally:
        del norm.weight_loader
        state_of(engine.model).inventory = None


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_gives_what_the_walk_gives(engine, a, b, inventory, data):
    """Any names in any order, repeated, BF16 or FP32, or FP8 codes with scales, in any batches."""
    names = data.draw(st.lists(st.sampled_from(sorted(a)), min_size=1, max_size=24))
    stream: list[tuple[str, torch.Tensor]] = []
    for name in names:
        tensor = {"a": a, "b": b}[data.draw(st.sampled_from("ab"))][name]
        kind = data.draw(st.sampled_from(["as it is", "float32", "fp8"]))
        if kind == "fp8" and name.endswith("proj.weight"):
            codes, scale_inv = quantize_block(tensor)
            pair = [(name, codes), (f"{name}_scale_inv", scale_inv)]
            stream += data.draw(st.permutations(pair))
        else:
            stream.append((name, tensor.float() if kind == "float32" else tensor))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=3)))
    batches = [stream[i:j] for i, j in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    results = []
    for load in (engine.model.load_weights, lambda batch: walked(engine, batch)):
        walked(engine, a.items())
        said = [load(batch) for batch in batches if batch]
        results.append((state(engine), said))
    assert same_state(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_replaced_storage_is_written_where_it_is_now(engine, a, b, inventory):
    layer = engine.model.model.layers[0].mlp.down_proj
    old = layer.weight.data
    layer.weight.data = torch.zeros_like(old)
    try:
        engine.model.load_weights(
            [("model.layers.0.mlp.down_proj.weight", b["model.layers.0.mlp.down_proj.weight"])]
        )
        wanted = quantize_block(b["model.layers.0.mlp.down_proj.weight"]).codes
        assert torch.equal(layer.weight.view(torch.uint8), wanted.view(torch.uint8))
        assert not torch.equal(old.view(torch.uint8), wanted.view(torch.uint8))
    finally:
        layer.weight.data = old


def raw_copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


@pytest.mark.parametrize("leaf", ["weight", "weight_scale_inv"])
def test_other_loaders_of_quantized_parameters_are_refused(engine, leaf):
    """As Mamba's mixers do: BF16 would be cast into FP8 storage."""
    parameter = getattr(engine.model.model.layers[0].self_attn.o_proj, leaf)
    with pytest.raises(UnsupportedError, match=rf"raw_copy to load '.*o_proj\.{leaf}'"):
        parameter.weight_loader = raw_copy
    with pytest.raises(UnsupportedError, match="another loader"):
        del parameter.weight_loader


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("keys", "values"), [(128, 256), (64, 96)])
def test_one_tensor_of_three_matrices_on_two_ranks(engine, rank, keys, values):
    """Each rank has its heads of q, of k, of v and of z; blocks may be shared."""
    columns, sizes = 256, [keys, keys, values, values]  # of one rank
    storage = empty_storage(sum(sizes), columns)
    grid = BlockGrid("layer", lambda: storage, sizes, columns, "fp32")
    layer: Any = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.output_sizes, layer.input_size = [2 * size for size in sizes], columns
    generator = torch.Generator().manual_seed(rank)
    whole = [torch.randn(2 * size, columns, generator=generator) for size in sizes]
    sent = {"in_proj_qkv": torch.cat(whole[:3]), "in_proj_z": whole[3]}
    expected = quantize_block(torch.cat([part.chunk(2)[rank] for part in whole]))
    entries: dict[str, Any] = {}
    for kind, data in ((Fp8Weight, storage[0]), (Fp8Scale, storage[1])):
        parameter = kind(data, grid=grid, weight_loader=print)
        parameter.tp_rank, parameter.tp_size = rank, 2
        name = f"x.in_proj_qkvz.{kind.leaf}"
        entries |= dict(inventory_module._linear(name, layer, parameter, {}))
    assert entries["x.in_proj_qkv.weight"].shape == (2 * (2 * keys + values), columns)
    assert all(entry.codes_fit == (keys == 128) for entry in entries.values())
    for in_codes in (False, True) if keys == 128 else (False,):
        storage[0].view(torch.uint8).zero_()
        batch = WriteBatch()
        with torch.no_grad():
            for part, tensor in sent.items():
                codes, scale_inv = quantize_block(tensor)
                entries[f"x.{part}.weight"].route(codes if in_codes else tensor, batch)
                if in_codes:
                    entries[f"x.{part}.weight_scale_inv"].route(scale_inv, batch)
            batch.run()
        assert same_bits(storage[0], expected.codes) and same_bits(storage[1], expected.scale_inv)

"""Loads by the routes of the inventory against vLLM's own walk: same storage, same errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from fp8rl.errors import UnsupportedError
from fp8rl.numerics import quantize_block
from support.engine import SCALES, Engine, same_bits, same_state
from vllm_fp8rl.refit.receiver import inventory as inventory_module
from vllm_fp8rl.storage.block_grid import BlockGrid, WriteBatch, empty_storage
from vllm_fp8rl.storage.parameters import Fp8Scale, Fp8Weight

pytestmark = pytest.mark.usefixtures("restored")


def walked(engine: Engine, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """By vLLM, as everything that comes as a generator."""
    return engine.model.load_weights(item for item in tensors)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch_gives_what_the_walk_gives(engine, a, b, data):
    """Any names in any order, repeated, BF16 or FP32, or FP8 codes with scales, in any batches."""
    sources = {"a": a | SCALES, "b": b | {name: 2 * scale for name, scale in SCALES.items()}}
    names = data.draw(st.lists(st.sampled_from(sorted(sources["a"])), min_size=1, max_size=24))
    stream: list[tuple[str, torch.Tensor]] = []
    for name in names:
        tensor = sources[data.draw(st.sampled_from("ab"))][name]
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
        walked(engine, sources["a"].items())
        said = [load(batch) for batch in batches if batch]
        held = [*engine.model.named_parameters(), *engine.model.named_buffers()]
        results.append(({name: tensor.detach().clone() for name, tensor in held}, said))
    assert same_state(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def raw_copy(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    param.data.copy_(loaded_weight)


def test_other_loaders_of_quantized_parameters_are_refused(engine):
    """As Mamba's mixers do: BF16 would be cast into FP8 storage."""
    parameter = engine.model.model.layers[0].self_attn.o_proj.weight
    with pytest.raises(UnsupportedError, match=r"raw_copy to load '.*o_proj\.weight'"):
        parameter.weight_loader = raw_copy
    with pytest.raises(UnsupportedError, match="another loader"):
        del parameter.weight_loader


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("keys", "values", "form"), [(128, 256, "codes"), (64, 96, "BF16")])
def test_one_tensor_of_three_matrices_on_two_ranks(engine, rank, keys, values, form):
    """Each rank has its heads of q, of k, of v and of z; blocks may be shared."""
    columns, sizes = 256, [keys, keys, values, values]  # of one rank
    storage = empty_storage(sum(sizes), columns)
    grid = BlockGrid("layer", lambda: storage, sizes, columns, "fp32")
    layer: Any = MergedColumnParallelLinear.__new__(MergedColumnParallelLinear)
    torch.nn.Module.__init__(layer)
    layer.output_sizes, layer.input_size = [2 * size for size in sizes], columns
    whole = [torch.randn(2 * size, columns) for size in sizes]
    sent = {"x.in_proj_qkv": torch.cat(whole[:3]), "x.in_proj_z": whole[3]}
    entries: dict[str, Any] = {}
    for kind, data in ((Fp8Weight, storage[0]), (Fp8Scale, storage[1])):
        parameter = kind(data, grid=grid, weight_loader=print)
        parameter.tp_rank, parameter.tp_size = rank, 2
        name = f"x.in_proj_qkvz.{kind.leaf}"
        entries |= dict(inventory_module._linear(name, layer, parameter, {}))
    assert entries["x.in_proj_qkv.weight"].shape == (2 * (2 * keys + values), columns)
    assert all(entry.codes_fit == (form == "codes") for entry in entries.values())
    batch = WriteBatch()
    with torch.no_grad():
        for name, tensor in sent.items():
            codes, scale_inv = quantize_block(tensor)
            entries[f"{name}.weight"].route(codes if form == "codes" else tensor, batch)
            if form == "codes":
                entries[f"{name}.weight_scale_inv"].route(scale_inv, batch)
        batch.run()
    expected = quantize_block(torch.cat([part.chunk(2)[rank] for part in whole]))
    assert all(map(same_bits, storage, expected))

"""Loads by the plan against vLLM's own walk: the same storage, the same errors."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.models.utils import AutoWeightsLoader

from fp8rl.errors import Fp8RLError, RefitError, UnsupportedError
from fp8rl.kv_scales import scale_names
from fp8rl.numerics import quantize_block
from support.engine import KV_SCALE, LAYERS, Engine, load_tensors
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.plan import LoadPlan

UP = "model.layers.1.mlp.up_proj.weight"
SCALES = {name: torch.tensor([KV_SCALE]) for name in scale_names(LAYERS, ("k", "v"))}


@pytest.fixture(scope="module")
def a(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    return load_tensors(checkpoints["a"]) | SCALES


@pytest.fixture(scope="module")
def b(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    return load_tensors(checkpoints["b"]) | {n: t * 2 for n, t in SCALES.items()}


@pytest.fixture
def plan(engine: Engine, a: dict[str, torch.Tensor]):
    """The engine's plan, complete; the engine has the weights of ``a`` before and after."""
    refit(engine.llm, a.items(), expect_kv_scales=True)
    engine.model.load_weights(SCALES.items())  # those of a refit do not come this way
    assert list(LoadPlan.of(engine.model)._strange(a)) == []
    yield LoadPlan.of(engine.model)
    refit(engine.llm, a.items(), expect_kv_scales=True)


def state(engine: Engine) -> dict[str, torch.Tensor]:
    tensors = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(t.reshape(-1).view(torch.uint8), other[n].reshape(-1).view(torch.uint8))
        for n, t in one.items()
    )


def walked(engine: Engine, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """By vLLM: what comes as a generator is not planned."""
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


def test_a_known_batch_needs_no_walk(engine, a, b, plan, monkeypatch):
    walks = Walks(monkeypatch)
    loaded = engine.model.load_weights(list(b.items()))
    assert walks.count == 0
    planned = state(engine)
    assert walked(engine, b.items()) == loaded
    assert walks.count > 0
    assert same(planned, state(engine))
    walked(engine, a.items())
    assert not same(planned, state(engine)), "a and b must differ for this to mean anything"


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_batch_gives_what_the_walk_gives(engine, a, b, plan, data):
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
    assert same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_a_name_that_came_twice_is_learnt_when_it_comes_once(engine, a, b, plan):
    del engine.model.__dict__["fp8rl_load_plan"]
    engine.model.load_weights([(UP, b[UP]), (UP, a[UP])])
    assert not LoadPlan.of(engine.model).covers([UP])
    engine.model.load_weights([(UP, b[UP])])
    assert LoadPlan.of(engine.model).covers([UP])


@pytest.mark.parametrize("name", ["model.norm.weight", UP])
def test_the_last_of_one_name_counts_whatever_its_dtype(engine, a, b, plan, name):
    """Some are written at once, others are put off."""
    variants = [a[name], b[name].float(), b[name], a[name].float()]
    for first in variants:
        for second in variants:
            stream = [(name, first), (name, second)]
            results = []
            for load in (engine.model.load_weights, lambda batch: walked(engine, batch)):
                load(stream)
                results.append(state(engine))
            assert same(*results)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (UP, torch.ones(3, 5)),
        (UP, torch.ones(512, 256, dtype=torch.int8)),
        (f"{UP}_scale_inv", torch.zeros(4, 2)),
        (f"{UP}_scale_inv", torch.ones(3, 2)),
        (next(iter(SCALES)), torch.zeros(1)),
        ("model.norm.weight", torch.ones(3)),
        ("lm_head.weight", torch.ones(3, 256)),
        ("lm_head.weight", torch.ones(512, 256, dtype=torch.int8)),
        ("model.layers.9.mlp.up_proj.weight", torch.ones(2)),
        ("nothing.like.it", torch.ones(2)),
    ],
)
def test_the_same_errors(engine, a, plan, name, tensor):
    if name.endswith("_scale_inv"):  # not among the names that a BF16 refit brings
        refit(engine.llm, fp8(a).items(), expect_kv_scales=True)
        assert plan.covers([name])
    errors = []
    for load in (engine.model.load_weights, lambda batch: walked(engine, batch)):
        with pytest.raises(Exception) as caught:
            load([("model.norm.weight", a["model.norm.weight"]), (name, tensor)])
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            wire[name], wire[f"{name}_scale_inv"] = quantize_block(tensor)
        else:
            wire[name] = tensor
    return wire


def test_tensors_before_an_error_are_written(engine, a, b, plan):
    with pytest.raises(RefitError):
        engine.model.load_weights([(UP, b[UP]), ("model.layers.0." + UP[15:], torch.ones(2))])
    planned = state(engine)
    walked(engine, a.items())
    walked(engine, [(UP, b[UP])])
    assert same(planned, state(engine))


def test_one_tensor_under_several_names_is_not_confused(engine, a, plan):
    """Layers that share tensors, as in benchmarks; a fresh plan learns from such a batch."""
    shared = {n: a[n.replace("layers.1.", "layers.0.")] for n in a}
    del engine.model.__dict__["fp8rl_load_plan"]
    engine.model.load_weights(list(shared.items()))
    assert LoadPlan.of(engine.model).covers(shared)
    engine.model.load_weights(list(a.items()))
    planned = state(engine)
    walked(engine, a.items())
    assert same(planned, state(engine))


def test_replaced_parameters_are_loaded_by_vllm(engine, a, b, plan, monkeypatch):
    norm = engine.model.model.norm
    old = norm.weight
    name = "model.norm.weight"
    norm.weight = torch.nn.Parameter(torch.zeros_like(old), requires_grad=False)
    try:
        assert not plan.covers([name])
        assert plan.covers([UP])
        engine.model.load_weights([(name, b[name])])
        assert torch.equal(norm.weight, b[name].float())
        assert plan.covers([name])  # learnt again
    finally:
        norm.weight = old
    assert not plan.covers([name])
    refit(engine.llm, b.items(), expect_kv_scales=True)
    assert torch.equal(norm.weight, b[name].float())


def test_replaced_storage_is_written_where_it_is_now(engine, a, b, plan):
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


def test_a_layerwise_reload_in_between(engine, a, b, plan):
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(b.items())})
    reloaded = state(engine)
    walked(engine, b.items())
    assert same(reloaded, state(engine))
    assert plan.covers(a)
    refit(engine.llm, a.items(), expect_kv_scales=True)
    planned = state(engine)
    walked(engine, a.items())
    assert same(planned, state(engine))


def test_recording_leaves_no_trace(engine, a, plan):
    def loaders() -> dict[str, object]:
        return {n: getattr(p, "weight_loader", None) for n, p in engine.model.named_parameters()}

    before = loaders()
    del engine.model.__dict__["fp8rl_load_plan"]
    engine.model.load_weights(list(a.items()))
    with pytest.raises(Fp8RLError):
        engine.model.load_weights([(UP, torch.ones(2)), ("model.norm.weight", torch.ones(3))])
    assert loaders() == before
    assert all("store" not in vars(p) for p in engine.model.parameters())


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


def test_a_load_that_skips_quantization_is_an_error(engine, a, plan):
    """Other code may reach the private attribute: then the batch fails, and a refit closes."""
    o_proj = engine.model.model.layers[0].self_attn.o_proj
    name, own = "model.layers.0.self_attn.o_proj.weight", o_proj.weight._weight_loader
    o_proj.weight._weight_loader = raw_copy
    try:
        assert not plan.covers([name])
        with pytest.raises(UnsupportedError, match=rf"'{name}' was loaded by raw_copy"):
            engine.model.load_weights([(name, a[name])])
        with pytest.raises(UnsupportedError, match="raw_copy"):
            refit(engine.llm, a.items(), expect_kv_scales=True)
        with pytest.raises(RefitError, match="mixture"):
            engine.greedy([[5, 6, 7]])
    finally:
        o_proj.weight._weight_loader = own

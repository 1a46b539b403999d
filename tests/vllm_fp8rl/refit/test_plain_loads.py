"""Plain ``model.load_weights`` that fail: old weights, or a model that stays closed."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.kv_scales import fp8_layers
from vllm_fp8rl.refit import RefitSession, drop_requests
from vllm_fp8rl.state import state_of

pytestmark = pytest.mark.usefixtures("restored")
QKV = "model.layers.0.self_attn.qkv_proj.weight"


@pytest.mark.parametrize("kind", [list, iter])
def test_a_first_tensor_that_is_partly_written_closes_the_model(engine, a, tokens, kind):
    """A tensor fused as the engine has it: q and k are written before v is found too short."""
    parts = [a[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    with pytest.raises((RefitError, RuntimeError)):
        engine.model.load_weights(kind([(QKV, 2 * torch.cat(parts)[:-8])]))
    with pytest.raises(RefitError, match="a load broke off"):
        engine.greedy(PROMPTS)
    drop_requests(engine.llm)
    engine.model.load_weights(kind(a.items()))
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("nothing.like.it", torch.ones(2)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(3, 5)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(512, 256, dtype=torch.int8)),
        ("model.norm.weight", torch.full((256,), torch.nan)),
    ],
)
def test_a_first_tensor_that_is_refused_leaves_all_as_it_was(engine, tokens, kind, name, tensor):
    with pytest.raises(Exception, match=r"\w"):
        engine.model.load_weights(kind([(name, tensor)]))
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_a_kv_scale_of_a_load_that_breaks_off_is_whole(engine, a):
    """The number that attention is given and the tensor that it reads must be the same."""
    name = next(iter(SCALES))
    with pytest.raises(Exception, match=r"\w"):
        engine.model.load_weights(
            [(name, torch.tensor([0.2])), ("model.norm.weight", torch.ones(3))]
        )
    engine.model.load_weights(list(a.items()))
    engine.llm.reset_prefix_cache()
    engine.greedy(PROMPTS)
    layer, scales = next(iter(fp8_layers(engine.model)))
    assert float(layer._k_scale) == float(layer.k_scale) == pytest.approx(scales.values["k"])
    assert not state_of(engine.model).guard.closed


def inner(tensors):
    """What ``model.model.load_weights`` takes: all but the output projection."""
    return [(n.removeprefix("model."), t) for n, t in tensors.items() if n.startswith("model.")]


def break_off(model, tensors):
    with pytest.raises(Exception, match=r"\w"):
        model.load_weights([*list(tensors)[:5], ("norm.weight", torch.ones(3))])


def test_a_part_of_the_model_that_broke_off_opens_with_the_whole_part(engine, a, tokens):
    part = inner(a)
    break_off(engine.model.model, part)
    engine.model.load_weights([("lm_head.weight", a["lm_head.weight"])])
    assert state_of(engine.model).guard.closed
    engine.model.model.load_weights(part)
    assert not state_of(engine.model).guard.closed
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize("first", ["the part", "the rest"])
def test_a_part_does_not_open_a_model_whose_load_broke_off(engine, a, first):
    """Its output projection is still owed, whichever of the two broken loads came first."""
    guard = state_of(engine.model).guard
    if first == "the part":
        break_off(engine.model.model, inner(a))
    break_off(engine.model, [(n, t) for n, t in reversed(a.items())])
    engine.model.model.load_weights(inner(a))
    with pytest.raises(RefitError, match="a load broke off"):
        guard.require_ready()
    engine.model.load_weights([("lm_head.weight", a["lm_head.weight"])])
    assert not guard.closed


def test_the_rest_of_a_broken_load_does_not_open_a_model_whose_refit_broke_off(engine, a, b):
    names = list(a)
    break_off(engine.model, a.items())
    engine.model.load_weights([(name, a[name]) for name in names[:-1]])
    with pytest.raises(ConnectionError), RefitSession(engine.model, expect_kv_scales=None) as refit:
        refit.load(list(b.items())[:3])
        raise ConnectionError
    engine.model.load_weights([(names[-1], a[names[-1]])])
    assert state_of(engine.model).guard.closed

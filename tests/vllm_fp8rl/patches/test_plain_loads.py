"""Plain ``model.load_weights``: new weights, or old ones, or a model that stays closed."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
from vllm.model_executor.models.utils import AutoWeightsLoader

from fp8rl.errors import RefitError, ScaleError, UnsupportedError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.scales import fp8_layers
from vllm_fp8rl.refit import RefitSession

pytestmark = pytest.mark.usefixtures("restored")
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
K0 = "model.layers.0.self_attn.k_scale"
QKV = "model.layers.0.self_attn.qkv_proj.weight"


CLOSED = (RefitError, "half-updated: a load broke off.*refit the engine")


def serves(engine, expected) -> bool:
    engine.llm.reset_prefix_cache()
    return engine.greedy(PROMPTS) == expected


NAMES = {"projection": UP, "norm": NORM, "vocabulary": "model.embed_tokens.weight", "scale": K0}
ODD = {
    "0-dim": lambda t: torch.tensor(1.0),
    "rank 1 more": lambda t: t[None],
    "no element": lambda t: t[:0],
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "int64": lambda t: t.long(),
    "uint8": lambda t: t.to(torch.uint8),
    "float8_e5m2": lambda t: t.to(torch.float8_e5m2),
    "float8_e4m3fn": lambda t: t.to(torch.float8_e4m3fn),
    "float64": lambda t: t.double(),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "lazy": lambda t: torch.nn.UninitializedParameter(),
    "None": lambda t: None,
    "freed": lambda t: freed(t.clone()),
}
TAKEN = {  # one element for a scale, in any shape; FP8 codes for a projection
    *(
        (odd, "scale")
        for odd in ("0-dim", "rank 1 more", "float64", "float8_e5m2", "float8_e4m3fn")
    ),
    ("float8_e4m3fn", "projection"),
}


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse")
def test_odd_tensors_are_refused_in_a_sentence(engine, a, tokens):
    """vLLM's loaders cast an integer, a bool or a complex number to a norm's dtype in silence."""
    for (what, name), (odd, change) in product(NAMES.items(), ODD.items()):
        if (odd, what) in TAKEN:
            continue
        for kind in (list, iter):
            tensor = change((a | SCALES)[name])
            with pytest.raises((RefitError, ScaleError, UnsupportedError)) as error:
                engine.model.load_weights(kind([(name, tensor)]))
            message = str(error.value)
            assert re.fullmatch(r".*(send|yield).*[.]", message), message
    assert engine.greedy(PROMPTS) == tokens["a"]


def half(tensors, error):
    yield from list(tensors.items())[:3]
    raise error


def and_a_wrong_one(tensors):
    return [*list(tensors.items())[:3], (UP, torch.ones(3, 5))]


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (and_a_wrong_one, RefitError),
        (lambda b: iter(and_a_wrong_one(b)), RefitError),
        (lambda b: half(b, OSError), OSError),
        (lambda b: half(b, KeyboardInterrupt), KeyboardInterrupt),
    ],
    ids=["list", "iter", "OSError", "KeyboardInterrupt"],
)
@pytest.mark.parametrize("later", [list, iter])
def test_a_load_that_breaks_off_closes_the_model_until_all_has_come(
    engine, b, tokens, sent, kind, later
):
    """NeMo RL and others call ``model.load_weights`` alone, with nobody to say it is complete."""
    with pytest.raises(kind):
        engine.model.load_weights(sent(b))
    engine.refuses(RefitError, rf"a load broke off \({kind.__name__}\)")
    items = list(b.items())
    engine.model.load_weights(later(items[:-1]))
    engine.refuses(*CLOSED)
    engine.model.load_weights(later(items[-1:]))
    assert serves(engine, tokens["b"])


@pytest.mark.parametrize("kind", [list, iter])
def test_a_first_tensor_that_is_partly_written_closes_the_model(engine, a, tokens, kind):
    """A tensor fused as the engine has it: q and k are written before v is found too short."""
    parts = [a[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    with pytest.raises((RefitError, RuntimeError)):
        engine.model.load_weights(kind([(QKV, 2 * torch.cat(parts)[:-8])]))
    engine.refuses(*CLOSED)
    engine.model.load_weights(kind(a.items()))
    assert serves(engine, tokens["a"])


def test_a_kv_scale_of_a_load_that_breaks_off_is_whole(engine, a):
    """The number that attention is given and the tensor that it reads must be the same."""
    name = next(iter(SCALES))
    with pytest.raises(Exception, match=r"\w"):
        engine.model.load_weights([(name, torch.tensor([0.2])), (UP, torch.ones(3))])
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
        model.load_weights(iter([*list(tensors)[:5], ("norm.weight", torch.ones(3))]))


@pytest.mark.parametrize("broken", ["the part", "the whole"])
def test_a_part_does_not_open_a_model_whose_load_broke_off(engine, a, broken):
    """All tensors have to come again, by their names in the whole model."""
    guard = state_of(engine.model).guard
    if broken == "the part":
        break_off(engine.model.model, inner(a))
    else:
        break_off(engine.model, [(n, t) for n, t in reversed(a.items())])
    engine.model.model.load_weights(inner(a))
    with pytest.raises(RefitError, match="a load broke off"):
        guard.require_ready()
    names = list(a)
    engine.model.load_weights([(name, a[name]) for name in names[:-1]])
    assert guard.closed
    engine.model.load_weights([(names[-1], a[names[-1]])])
    assert not guard.closed


@pytest.mark.parametrize("part", ["model.layers.0.mlp", "model.layers.0.mlp.down_proj", "lm_head"])
def test_a_part_without_attention_does_not_open_a_model_of_which_all_is_owed(
    engine, a, tokens, part
):
    """Only fp8rl's methods know the whole names there; a single linear layer's are not used."""
    guard = state_of(engine.model).guard
    guard.values.owed = None  # as after a reload_weights that broke off
    guard.close("a test's load broke off")
    own = [(n.removeprefix(f"{part}."), t) for n, t in a.items() if n.startswith(f"{part}.")]
    assert own
    AutoWeightsLoader(engine.model.get_submodule(part)).load_weights(own)
    assert guard.closed and guard.values.owed is None
    engine.model.load_weights(a.items())
    assert serves(engine, tokens["a"])


def test_the_rest_of_a_broken_load_does_not_open_a_model_whose_refit_broke_off(engine, a, b):
    names = list(a)
    break_off(engine.model, a.items())
    engine.model.load_weights([(name, a[name]) for name in names[:-1]])
    with pytest.raises(ConnectionError), RefitSession(engine.model, expect_kv_scales=None) as refit:
        refit.load(list(b.items())[:3])
        raise ConnectionError
    engine.model.load_weights([(names[-1], a[names[-1]])])
    assert state_of(engine.model).guard.closed

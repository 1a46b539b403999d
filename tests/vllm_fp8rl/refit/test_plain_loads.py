"""Plain ``model.load_weights`` that fail: old weights, or a model that stays closed."""

from __future__ import annotations

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.quantization.kv_cache import fp8_layers
from vllm_fp8rl.refit import drop_requests
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

"""vLLM's ``reload_weights``: a load in place, complete or a refusal."""

from __future__ import annotations

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (  # as frameworks do, before an engine starts
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from fp8rl.errors import RefitError, UnsupportedError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.refit import drop_requests, refit, require_ready

pytestmark = pytest.mark.usefixtures("restored")
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def runner(engine):
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner


def reload(engine, tensors=None, **arguments):
    if tensors is not None:
        arguments["weights_iterator"] = tensors
    engine.llm.collective_rpc("reload_weights", kwargs=arguments)


def serves(engine, expected):
    drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    return engine.greedy(PROMPTS) == expected


def test_from_the_last_folder_again(engine, checkpoints, a, b, tokens):
    reload(engine, weights_path=str(checkpoints["b"]))
    reload(engine, a.items())
    assert serves(engine, tokens["a"])
    reload(engine)
    assert serves(engine, tokens["b"])
    reload(engine, weights_path=str(checkpoints["a"]))


def test_keys_of_older_weights_are_not_read(engine, b, tokens):
    engine.greedy(PROMPTS)
    reload(engine, iter(b.items()))
    engine.refuses(RefitError, "keys of older weights; call reset_prefix_cache")
    assert serves(engine, tokens["b"])


def test_names_that_vllm_skips_or_maps_are_taken(engine, b, tokens):
    extra = b | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    for name, scale in SCALES.items():
        layer, leaf = name.rsplit(".", 1)
        extra[f"{layer}.{leaf[0]}_proj.{leaf}"] = scale
    reload(engine, iter(extra.items()))
    assert serves(engine, tokens["b"])


def with_a_nan(b):
    return b | {UP: torch.full_like(b[UP], torch.nan)}


def dies(b):
    yield from list(b.items())[:9]
    raise ConnectionError("trainer gone")


@pytest.mark.parametrize(
    ("sent", "kind", "message"),
    [
        (lambda b: [item for item in b.items() if item[0] != UP], RefitError, f"lacks 1 .*'{UP}'"),
        (lambda b: with_a_nan(b).items(), RefitError, f"'{UP}' has NaN or infinite values"),
        (lambda b: iter([*b.items(), (UP, b[UP])]), RefitError, f"'{UP}' arrived twice in one"),
        (dies, ConnectionError, "trainer gone"),
    ],
    ids=["incomplete", "NaN", "twice", "breaks off"],
)
def test_a_fault_closes_the_engine_until_all_has_come(engine, b, tokens, sent, kind, message):
    with pytest.raises(kind, match=message):
        reload(engine, sent(b))
    engine.refuses(RefitError, r"half-updated: reload_weights broke off")
    reload(engine, b.items())
    assert serves(engine, tokens["b"])


@pytest.mark.parametrize("spelling", ["self_attn.", "self_attn.attn.", "self_attn.k_proj."])
def test_some_kv_scales_but_not_all(engine, a, tokens, spelling):
    name = f"model.layers.0.{spelling}k_scale"
    with pytest.raises(RefitError, match=f"reload_weights lacks {len(SCALES) - 1} .*_scale"):
        reload(engine, iter((a | {name: torch.tensor([0.5])}).items()))
    engine.refuses(Exception, r"KV scale '.*' was never loaded")
    reload(engine, iter((a | SCALES).items()))
    assert serves(engine, tokens["a"])


def first_is_nan(b):
    (name, tensor), *rest = b.items()
    return {"weights_iterator": iter([(name, torch.full_like(tensor, torch.nan)), *rest])}


def past_the_loaders(b):
    """vLLM would cast BF16 to FP8 under the old scales."""
    return {"weights_iterator": list(b.items()), "is_checkpoint_format": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda b: {"weights_path": "/none/such"}, "/none/such"),
        (first_is_nan, "has NaN or infinite values; it was not loaded"),
        (lambda b: {"weights_iterator": [*b.items(), (UP, b[UP])]}, f"'{UP}' arrived twice in one"),
        (past_the_loaders, r"is_checkpoint_format=False.* send HF tensors"),
    ],
    ids=["no folder", "NaN first", "twice in a collection", "not as in a checkpoint"],
)
def test_what_changes_nothing(engine, runner, b, tokens, arguments, message):
    before = runner.model_config.model
    with pytest.raises(Exception, match=message):
        reload(engine, **arguments(b))
    assert runner.model_config.model == before
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_an_engine_without_a_checkpoint_names_the_remedy(engine, monkeypatch, tokens):
    config = engine.llm.llm_engine.vllm_config.load_config
    monkeypatch.setattr(config, "load_format", "dummy")
    with pytest.raises(UnsupportedError, match=r"load_format='dummy'.*vllm_fp8rl\.refit\.refit"):
        reload(engine)
    assert engine.greedy(PROMPTS) == tokens["a"]


# vLLM's layerwise reload, as prime-rl and SkyRL call it: around ``model.load_weights``.


def layerwise(engine, *loads):
    config = engine.llm.llm_engine.vllm_config
    device = next(engine.model.parameters()).device
    with torch.device(device), set_current_vllm_config(config):  # as prime-rl does
        initialize_layerwise_reload(engine.model)
        for tensors in loads:
            engine.model.load_weights(tensors)
        finalize_layerwise_reload(engine.model, config.model_config)


@pytest.mark.parametrize(
    ("loads", "kind", "message"),
    [
        (lambda b: ([i for i in b.items() if i[0] != UP],), RefitError, f"lacks 1 .*'{UP}'"),
        (lambda b: (list(b.items())[:3], with_a_nan(b).items()), RefitError, "arrived twice"),
        (lambda b: (with_a_nan(b).items(),), RefitError, f"'{UP}' has NaN"),
        (lambda b: (iter([*b.items(), (UP, b[UP])]),), RefitError, f"'{UP}' arrived twice in one"),
        (lambda b: (list(b.items())[:9], dies(b)), RefitError, "arrived twice"),
        (lambda b: (dies(b),), ConnectionError, "trainer gone"),
    ],
    ids=["incomplete", "twice in two", "NaN", "twice", "twice in a stream", "breaks off"],
)
def test_a_broken_layerwise_reload_closes_the_engine(engine, b, tokens, loads, kind, message):
    with pytest.raises(kind, match=message):
        layerwise(engine, *loads(b))
    with pytest.raises(RefitError, match="half-updated: The layerwise reload broke off"):
        require_ready(engine.llm)
    with pytest.raises(RefitError, match="No layerwise reload is under way"):
        finalize_layerwise_reload(engine.model, engine.llm.llm_engine.model_config)
    engine.refuses(RefitError, "half-updated")
    if kind is RefitError:
        refit(engine.llm, b.items(), expect_kv_scales=False)
    else:
        layerwise(engine, b.items())
    assert serves(engine, tokens["b"])


def test_a_layerwise_reload_whose_sender_died_is_begun_again(engine, a, b, tokens):
    initialize_layerwise_reload(engine.model)
    assert engine.greedy(PROMPTS) == tokens["a"]  # nothing has come yet
    engine.model.load_weights(list(a.items())[:5])
    engine.refuses(RefitError, "The layerwise reload broke off or was incomplete")
    layerwise(engine, b.items())
    assert serves(engine, tokens["b"])


def test_a_layerwise_reload_of_another_model_is_vllms(engine):
    plain = torch.nn.Linear(2, 2)
    record_metadata_for_reloading(plain)
    initialize_layerwise_reload(plain)
    assert plain.weight.is_meta
    finalize_layerwise_reload(plain, engine.llm.llm_engine.model_config)
    assert not plain.weight.is_meta

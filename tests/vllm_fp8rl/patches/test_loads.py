"""Loads that are no refit: ``load_weights``, ``reload_weights`` and vLLM's layerwise reload."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.model_loader.reload import (  # as frameworks do, before an engine starts
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES
from support.reloads import layerwise, reload
from vllm_fp8rl.refit import drop_requests, refit, require_ready

pytestmark = pytest.mark.usefixtures("restored")
NORM, UP = "model.norm.weight", "model.layers.1.mlp.up_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj.weight"
CLOSED = (RefitError, "half-updated: a load broke off.*refit the engine")


def plain(engine, tensors):
    """As NeMo RL and others, with nobody to say that all has come."""
    engine.model.load_weights(tensors)


def serves(engine, expected):
    drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    return engine.greedy(PROMPTS) == expected


def wrong(b):
    return [*list(b.items())[:3], (UP, torch.ones(3, 5))]


def lacking(b):
    return [item for item in b.items() if item[0] != UP]


def with_a_nan(b):
    return (b | {UP: torch.full_like(b[UP], torch.nan)}).items()


def twice(b):
    return [*b.items(), (UP, b[UP])]


def dies(b, error=ConnectionError):
    yield from list(b.items())[:9]
    raise error("trainer gone")


CTRL_C = KeyboardInterrupt
LAYERWISE = "The layerwise reload broke off"


@pytest.mark.parametrize(
    ("way", "sent", "error", "message", "reason"),
    [
        (plain, wrong, RefitError, r"\(3, 5\)", r"a load broke off \(RefitError\)"),
        (
            plain,
            lambda b: iter(wrong(b)),
            RefitError,
            r"\(3, 5\)",
            r"a load broke off \(RefitError\)",
        ),
        (plain, dies, ConnectionError, "gone", r"a load broke off \(ConnectionError\)"),
        (plain, lambda b: dies(b, CTRL_C), CTRL_C, "gone", r"a load broke off \(Keyb"),
        (reload, lacking, RefitError, f"lacks 1 .*'{UP}'", "reload_weights broke off"),
        (reload, with_a_nan, RefitError, f"'{UP}' has NaN", "reload_weights broke off"),
        (reload, lambda b: iter(twice(b)), RefitError, f"'{UP}' arrived twice", "reload_weights"),
        (reload, dies, ConnectionError, "trainer gone", "reload_weights broke off"),
        (layerwise, lambda b: [lacking(b)], RefitError, f"lacks 1 .*'{UP}'", LAYERWISE),
        (layerwise, lambda b: [wrong(b)[:3], b.items()], RefitError, "arrived twice", LAYERWISE),
        (layerwise, lambda b: [with_a_nan(b)], RefitError, f"'{UP}' has NaN", LAYERWISE),
        (layerwise, lambda b: [dies(b)], ConnectionError, "trainer gone", LAYERWISE),
    ],
)
def test_a_fault_closes_the_engine_until_all_has_come(
    engine, b, tokens, way, sent, error, message, reason
):
    with pytest.raises(error, match=message):
        way(engine, sent(b))
    with pytest.raises(RefitError, match=f"half-updated: {reason}"):
        require_ready(engine.llm)
    engine.refuses(RefitError, "half-updated")
    *most, last = b.items()
    if way is plain:
        engine.model.load_weights(iter(most) if error is RefitError else most)
        engine.refuses(*CLOSED)
        engine.model.load_weights([last])
    elif error is ConnectionError:
        way(engine, b.items() if way is reload else [b.items()])
    else:
        refit(engine.llm, b.items(), expect_kv_scales=False)
    assert serves(engine, tokens["b"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda b: {"weights_path": "/none/such"}, "/none/such"),
        (lambda b: {"weights_iterator": iter({UP: b[UP] * torch.nan}.items())}, "has NaN or inf"),
        (lambda b: {"weights_iterator": twice(b)}, f"'{UP}' arrived twice in one"),
        (  # vLLM would cast BF16 to FP8 under the old scales
            lambda b: {"weights_iterator": list(b.items()), "is_checkpoint_format": False},
            r"is_checkpoint_format=False.* send HF tensors",
        ),
    ],
    ids=["no folder", "NaN first", "twice in a collection", "not as in a checkpoint"],
)
def test_what_changes_nothing(engine, b, tokens, arguments, message):
    config = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model_config
    before = config.model
    with pytest.raises(Exception, match=message):
        reload(engine, **arguments(b))
    assert config.model == before
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_from_the_last_folder_again(engine, checkpoints, a, b, tokens):
    reload(engine, weights_path=str(checkpoints["b"]))
    reload(engine, a.items())
    assert serves(engine, tokens["a"])
    reload(engine)
    assert serves(engine, tokens["b"])
    reload(engine, weights_path=str(checkpoints["a"]))


def test_some_kv_scales_but_not_all(engine, a, tokens):
    name = "model.layers.0.self_attn.k_proj.k_scale"  # in another's spelling
    with pytest.raises(RefitError, match=f"reload_weights lacks {len(SCALES) - 1} .*_scale"):
        reload(engine, iter((a | {name: torch.tensor([0.5])}).items()))
    engine.refuses(Exception, r"KV scale '.*' was never loaded")
    reload(engine, iter((a | SCALES).items()))
    assert serves(engine, tokens["a"])


def test_a_layerwise_reload_whose_sender_died_is_begun_again(engine, a, b, tokens):
    initialize_layerwise_reload(engine.model)
    assert engine.greedy(PROMPTS) == tokens["a"]  # nothing has come yet
    engine.model.load_weights(list(a.items())[:5])
    engine.refuses(RefitError, "The layerwise reload broke off or was incomplete")
    layerwise(engine, [b.items()])
    with pytest.raises(RefitError, match="No layerwise reload is under way"):
        finalize_layerwise_reload(engine.model, engine.llm.llm_engine.model_config)
    assert serves(engine, tokens["b"])


def test_a_layerwise_reload_of_another_model_is_vllms(engine):
    plain = torch.nn.Linear(2, 2)
    record_metadata_for_reloading(plain)
    initialize_layerwise_reload(plain)
    assert plain.weight.is_meta
    finalize_layerwise_reload(plain, engine.llm.llm_engine.model_config)
    assert not plain.weight.is_meta


@pytest.mark.parametrize("kind", [list, iter])
def test_a_first_tensor_that_is_partly_written_closes_the_model(engine, a, kind):
    """A tensor fused as the engine has it: q and k are written before v is found too short."""
    parts = [a[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]
    with pytest.raises((RefitError, RuntimeError)):
        engine.model.load_weights(kind([(QKV, 2 * torch.cat(parts)[:-8])]))
    engine.refuses(*CLOSED)


@pytest.mark.parametrize("broken", ["the part", "the whole"])
def test_a_part_does_not_open_a_model_whose_load_broke_off(engine, a, broken):
    """All tensors have to come again, by their names in the whole model."""
    inner = [(n.removeprefix("model."), t) for n, t in a.items() if n.startswith("model.")]
    model, sent, leaf = engine.model, list(a.items()), NORM
    if broken == "the part":
        model, sent, leaf = engine.model.model, inner, "norm.weight"
    with pytest.raises(RefitError, match=r"\(3,\)"):
        model.load_weights(iter([*sent[:5], (leaf, torch.ones(3))]))
    engine.model.model.load_weights(inner)
    engine.refuses(*CLOSED)
    *most, last = a.items()
    engine.model.load_weights(most)
    engine.refuses(*CLOSED)
    engine.model.load_weights([last])
    require_ready(engine.llm)

"""vLLM's ``reload_weights``: which checkpoint it reads, and what it leaves behind."""

from __future__ import annotations

import copy

import pytest
import torch

from fp8rl.errors import RefitError
from support.engine import PROMPTS, SCALES
from vllm_fp8rl.refit import RefitSession, drop_requests
from vllm_fp8rl.state import state_of

pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture
def runner(engine):
    return engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner


def reload(engine, tensors):
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors.items())})


def test_the_config_of_the_runner_counts(engine, runner, checkpoints, tokens, monkeypatch):
    """``update_config`` of vLLM 0.25.1 replaces that one alone."""
    updated = copy.copy(runner.model_config)
    updated.model = str(checkpoints["b"])
    monkeypatch.setattr(runner, "model_config", updated)
    runner.reload_weights()
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_keys_of_older_weights_are_not_read(engine, b, tokens):
    engine.greedy(PROMPTS)
    reload(engine, b)
    with pytest.raises(RefitError, match="keys of older weights; call reset_prefix_cache"):
        engine.greedy(PROMPTS)
    drop_requests(engine.llm)
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_names_that_vllm_skips_or_maps_are_taken(engine, b, tokens):
    extra = b | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
    for name, scale in SCALES.items():
        layer, leaf = name.rsplit(".", 1)
        extra[f"{layer}.{leaf[0]}_proj.{leaf}"] = scale
    reload(engine, extra)
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_a_path_that_cannot_be_read_changes_nothing(engine, runner, tokens, tmp_path):
    before = runner.model_config.model
    with pytest.raises(Exception, match="nothing"):
        runner.reload_weights(weights_path=str(tmp_path / "nothing"))
    assert runner.model_config.model == before
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize("spelling", ["self_attn.", "self_attn.attn.", "self_attn.k_proj."])
def test_some_kv_scales_but_not_all(engine, a, spelling):
    name = f"model.layers.0.{spelling}k_scale"
    with pytest.raises(RefitError, match=f"The reload lacks {len(SCALES) - 1} .*_scale"):
        reload(engine, a | {name: torch.tensor([0.5])})
    with pytest.raises(Exception, match=r"KV scale '.*' was never loaded"):
        engine.greedy(PROMPTS)
    drop_requests(engine.llm)
    reload(engine, a | SCALES)
    engine.llm.reset_prefix_cache()
    assert len(engine.greedy(PROMPTS)) == len(PROMPTS)


def test_a_name_that_comes_twice(engine, a, b, tokens):
    """A collection is refused as it is; of a stream the first tensors are in the engine by then."""
    twice = [*b.items(), next(iter(b.items()))]
    with pytest.raises(RefitError, match=f"'{twice[-1][0]}' arrived twice in one refit or reload"):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": twice})
    assert engine.greedy(PROMPTS) == tokens["a"]
    with pytest.raises(RefitError, match=f"'{twice[-1][0]}' arrived twice"):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(twice)})
    with pytest.raises(RefitError, match="reload_weights broke off"):
        engine.greedy(PROMPTS)


def test_a_first_tensor_of_nan_changes_nothing(engine, b, tokens):
    (name, tensor), *rest = b.items()
    bad = {name: torch.full_like(tensor, torch.nan), **dict(rest)}
    with pytest.raises(RefitError, match=f"'{name}' has NaN or infinite values; it was not loaded"):
        reload(engine, bad)
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_a_reload_beside_a_refit_is_refused(engine, a, b, tokens):
    with RefitSession(engine.model, expect_kv_scales=None, name="first") as session:
        with pytest.raises(RefitError, match="'first', is under way"):
            reload(engine, b)
        session.load(list(a.items()))
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]
    assert state_of(engine.model).guard.session is None

"""Refits of the live engine: the same tokens as a fresh load. Refusals: ../test_refusals.py."""

from __future__ import annotations

import pytest
import torch

from fp8rl import PluginManager, hookimpl
from fp8rl.errors import ScaleError
from fp8rl.numerics import quantize_block
from support.engine import FUSED, LAYERS, PROMPTS, SCALES
from vllm_fp8rl.kv.scales import forget_kv_scales
from vllm_fp8rl.refit import refit

pytestmark = pytest.mark.usefixtures("restored")


def test_there_and_back(engine, a, b, tokens):
    before, wire = engine.pointers(), b | SCALES
    report = refit(engine.llm, wire.items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["b"]
    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["a"]
    assert engine.pointers() == before
    assert (report.tensors, report.kv_scales) == (len(wire), 2 * LAYERS)
    assert report.received_bytes == sum(t.nbytes for t in wire.values())
    # embedding, final norm, lm_head; per layer: qkv, o, gate_up, down, and 4 norms
    assert report.parameters == 3 + LAYERS * 8


def test_live_codes_are_those_of_the_contract(engine, a):
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, parts in FUSED.items():
            live = engine.model.get_submodule(f"{prefix}.{module}")
            wanted = quantize_block(torch.cat([a[f"{prefix}.{part}.weight"] for part in parts]))
            assert torch.equal(live.weight.view(torch.uint8), wanted.codes.view(torch.uint8))
            assert torch.equal(live.weight_scale_inv, wanted.scale_inv)


def test_prefix_cache_is_reset(engine, a, b):
    long = [list(range(2, 202))]
    with_a = engine.greedy(long)
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    with_b = engine.greedy(long)
    engine.model.load_weights(a.items())  # behind the front door: the prefix of b stays cached
    stale = engine.greedy(long)
    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(long) == with_a
    assert with_b != with_a
    assert stale != with_a, "this prompt does not notice a stale prefix, so the test is void"


def test_hooks_get_the_report_and_an_error_of_theirs_is_logged(engine, b, tokens, monkeypatch):
    """The new weights serve already."""

    class Plugin:
        @hookimpl
        def refit_finished(self, report):
            seen.append(report)
            raise OSError("the disk of the log is full")

    seen, logged = [], []
    plugins = PluginManager(discover=False)
    plugins.register(Plugin())
    monkeypatch.setattr("vllm_fp8rl.refit.sender.client.logger.exception", logged.append)
    report = refit(engine.llm, b.items(), expect_kv_scales=False, plugins=plugins)
    assert seen == [report]
    assert logged == ["A plugin's refit_finished failed; the refit itself is complete."]
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_direct_writes_to_parameters_are_seen(engine, tokens):
    """The float32 copy of a weight on CPU must not outlive a write that went past the loaders."""
    down = engine.model.get_submodule("model.layers.0.mlp.down_proj")
    assert engine.greedy(PROMPTS) == tokens["a"]  # the copy exists now
    down.weight_scale_inv.data[:] *= 4
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) != tokens["a"]
    down.weight_scale_inv.data[:] /= 4
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_a_second_scale_counts_and_none_is_a_refusal(engine):
    """vLLM drops a second KV scale, and starts from 1.0 where none has come."""
    first = "model.layers.0.self_attn"
    attention = engine.model.get_submodule(f"{first}.attn")
    for scale in (0.25, 0.5):
        engine.model.load_weights([(f"{first}.k_scale", torch.tensor([scale]))])
        assert attention._k_scale.item() == attention._k_scale_float == scale
    engine.llm.reset_prefix_cache()
    forget_kv_scales(engine.model)
    engine.refuses(ScaleError, "does not start from scale 1")

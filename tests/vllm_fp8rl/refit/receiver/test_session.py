"""Refits of the live engine: the same tokens as a fresh load, or a clear refusal."""

from __future__ import annotations

import pytest
import torch

from fp8rl import PluginManager, hookimpl
from fp8rl.errors import RefitError
from fp8rl.numerics import quantize_block
from support.engine import FUSED, LAYERS, PROMPTS, SCALES, Engine
from vllm_fp8rl.refit import RefitSession, refit
from vllm_fp8rl.refit.receiver.worker import STEPS, read_answer
from vllm_fp8rl.refit.transport import pack

UP = "model.layers.1.mlp.up_proj.weight"
pytestmark = pytest.mark.usefixtures("restored")


def restore(engine: Engine, a: dict[str, torch.Tensor]) -> None:
    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)


def test_there_and_back(engine, a, b, tokens):
    before = engine.pointers()
    report = refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["b"]
    restore(engine, a)
    assert engine.greedy(PROMPTS) == tokens["a"]
    assert engine.pointers() == before
    wire = b | SCALES
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


def test_prefix_cache_is_reset(engine, a, b, tokens):
    long = [list(range(2, 202))]
    with_a = engine.greedy(long)
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    with_b = engine.greedy(long)
    engine.model.load_weights(a.items())  # behind the front door: the prefix of b stays cached
    stale = engine.greedy(long)
    restore(engine, a)
    assert engine.greedy(long) == with_a
    assert with_b != with_a
    assert stale != with_a, "this prompt does not notice a stale prefix, so the test is void"


def through_refit(engine: Engine, stream) -> None:
    refit(engine.llm, stream, expect_kv_scales=False, batch_bytes=1 << 30)


def through_a_session(engine: Engine, stream) -> None:
    with RefitSession(engine.model, expect_kv_scales=False) as session:
        session.load(stream)


@pytest.mark.parametrize("give", [through_refit, through_a_session])
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("writes", ["in torch", "unseen", "zeros behind it"])
def test_reused_buffers_are_read_in_time(engine, b, tokens, give, buffers, writes):
    """With one batch for all, each tensor would have the values of a later one, or zeros."""
    size = max(t.numel() for t in b.values())
    rings = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(buffers)]

    def stream():
        for number, (name, tensor) in enumerate(b.items()):
            ring = rings[number % buffers]
            # By numpy, NCCL or another process: torch does not count such writes.
            target = ring if writes == "in torch" else ring.data
            yield name, target[: tensor.numel()].copy_(tensor.view(-1)).view(tensor.shape)
            if writes == "zeros behind it":
                target.zero_()

    give(engine, stream())
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]


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


def poisoned(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = tensor.float()
    copy.view(-1)[7] = value
    return copy


LACKING = [UP, "model.norm.weight", "lm_head.weight", *list(SCALES)[:1]]
TOO_LARGE = r"has values beyond 3\.2\d*e\+38, the largest that the engine can hold"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (lambda b, name=name: {n: t for n, t in b.items() if n != name}, f"lacks 1 .*'{name}'")
            for name in LACKING
        ),
        (lambda b: b | {UP: quantize_block(b[UP]).codes}, f"lacks 1 .*'{UP}_scale_inv'"),
        (lambda b: b | {UP: poisoned(b[UP], torch.inf)}, f"'{UP}' has NaN or infinite"),
        (lambda b: b | {UP: poisoned(b[UP], -3.4e38)}, f"'{UP}' {TOO_LARGE}"),
    ],
)
def test_a_fault_leaves_a_refusal_until_a_complete_refit(engine, b, tokens, change, message):
    with pytest.raises(RefitError, match=message):
        refit(engine.llm, change(b | SCALES).items(), expect_kv_scales=True, batch_bytes=1 << 18)
    engine.refuses(RefitError, "half-updated")
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["b"]


K0, NORM = "model.layers.0.self_attn.k_scale", "model.norm.weight"


def test_a_prefix_cache_that_cannot_be_reset_leaves_a_refusal(engine, b, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **options: False)
        with pytest.raises(RefitError, match="could not reset its prefix cache"):
            refit(engine.llm, b.items(), expect_kv_scales=False)
    engine.refuses(RefitError, "half-updated")


def test_session_needs_its_block(engine, a):
    session = RefitSession(engine.model, expect_kv_scales=False)
    with pytest.raises(RefitError, match="context manager"):
        session.load(a.items())


def test_direct_writes_to_parameters_are_seen(engine, a, tokens):
    """The float32 copy of a weight on CPU must not outlive a write that went past the loaders."""
    down = engine.model.get_submodule("model.layers.0.mlp.down_proj")
    assert engine.greedy(PROMPTS) == tokens["a"]  # the copy exists now
    down.weight_scale_inv.data[:] *= 4
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) != tokens["a"]
    down.weight_scale_inv.data[:] /= 4
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"model.unknown": torch.ones(8)}, "no tensor 'model.unknown'"),
        ({UP: torch.ones(3, 5)}, r"\(3, 5\)"),
        ({UP: torch.ones(512, 256, dtype=torch.uint16)}, r"torch\.uint16"),
        ({NORM: torch.ones(256), K0: torch.ones(1)}, "came unannounced"),
    ],
)
def test_what_is_packed_is_looked_up_before_it_is_read(engine, monkeypatch, sent, message):
    """Of 3 GiB under a wrong name nothing is made."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    read_answer(STEPS["fp8rl_refit_begin"](worker, "packed", False))
    with monkeypatch.context() as patch, pytest.raises(RefitError, match=message):
        patch.setattr("vllm_fp8rl.refit.transport.load", lambda payload: pytest.fail("was read"))
        read_answer(STEPS["fp8rl_refit_load_batch"](worker, "packed", pack(sent.items())))
    assert read_answer(STEPS["fp8rl_refit_abort"](worker, "packed", "ends")) is False

"""Refits of the live engine: the same tokens as a fresh load, or a clear refusal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fp8rl import PluginManager, hookimpl
from fp8rl.errors import RefitError, ScaleError
from fp8rl.numerics import quantize_block
from support.engine import LAYERS, PROMPTS, SCALES, Engine
from vllm_fp8rl.refit import RefitSession, drop_requests, refit, refit_from_files

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


def test_plain_load_weights_in_any_order_and_batching(engine, a, b, tokens):
    before = engine.pointers()
    names = sorted(b, key=lambda name: name[::-1])
    for name in names:
        engine.model.load_weights([(name, b[name])])
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]
    for _ in range(2):  # idempotent
        engine.model.load_weights(reversed(a.items()))
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]
    assert engine.pointers() == before


def test_vllms_own_reload_works_too(engine, a, b, tokens):
    before = engine.pointers()
    for weights, name in ((b, "b"), (a, "a")):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights.items()})
        engine.llm.reset_prefix_cache()
        assert engine.greedy(PROMPTS) == tokens[name]
    assert engine.pointers() == before


def test_process_weights_after_loading_changes_nothing(engine, tokens):
    before = engine.pointers()
    for module in engine.model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(module)
            method.process_weights_after_loading(module)
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]
    assert engine.pointers() == before


def test_live_codes_are_those_of_the_contract(engine, a):
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for module, parts in {
            "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
            "self_attn.o_proj": ["self_attn.o_proj"],
            "mlp.down_proj": ["mlp.down_proj"],
        }.items():
            live = engine.model.get_submodule(f"{prefix}.{module}")
            wanted = quantize_block(torch.cat([a[f"{prefix}.{part}.weight"] for part in parts]))
            assert torch.equal(live.weight.view(torch.uint8), wanted.codes.view(torch.uint8))
            assert torch.equal(live.weight_scale_inv, wanted.scale_inv)


def test_fp8_wire_gives_the_same_tokens(engine, b, tokens):
    wire: dict[str, torch.Tensor] = {}
    for name, tensor in b.items():
        if name.endswith("proj.weight"):
            wire[name], wire[f"{name}_scale_inv"] = quantize_block(tensor)
        else:
            wire[name] = tensor
    refit(engine.llm, (wire | SCALES).items(), expect_kv_scales=True, batch_bytes=1)
    assert engine.greedy(PROMPTS) == tokens["b"]


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


def test_from_files(engine, checkpoints, tokens):
    refit_from_files(engine.llm, str(checkpoints["b"]), expect_kv_scales=False)
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_sender_that_reuses_one_buffer(engine, b, tokens):
    buffer = torch.empty(max(t.numel() for t in b.values()), dtype=torch.bfloat16)

    def stream():
        for name, tensor in b.items():
            yield name, buffer[: tensor.numel()].view(tensor.shape).copy_(tensor)

    refit(engine.llm, stream(), expect_kv_scales=False, batch_bytes=1)
    assert engine.greedy(PROMPTS) == tokens["b"]


def through_refit(engine: Engine, stream) -> None:
    refit(engine.llm, stream, expect_kv_scales=False, batch_bytes=1 << 30)


def through_a_session(engine: Engine, stream) -> None:
    with RefitSession(engine.model, expect_kv_scales=False) as session:
        session.load(stream)


@pytest.mark.parametrize("give", [through_refit, through_a_session])
@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("writes", ["in torch", "unseen"])
def test_reused_buffers_are_noticed(engine, b, tokens, give, buffers, writes):
    """With one batch for all, each tensor would have the values of a later one."""
    size = max(t.numel() for t in b.values())
    rings = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(buffers)]

    def stream():
        for number, (name, tensor) in enumerate(b.items()):
            ring = rings[number % buffers]
            # By numpy, NCCL or another process: torch does not count such writes.
            target = ring if writes == "in torch" else ring.data
            yield name, target[: tensor.numel()].copy_(tensor.view(-1)).view(tensor.shape)

    with pytest.raises(RefitError, match=r"'[a-z0-9_.]+' came in the memory of '.*(clones).*=1"):
        give(engine, stream())
    assert engine.greedy(PROMPTS) == tokens["a"]  # nothing was written


def test_a_buffer_that_is_filled_for_the_next_batch_is_noticed(engine, b, tokens):
    """The tensor that does not fit into a batch is pulled before that batch is read."""
    items = [(name, tensor) for name, tensor in b.items() if name.endswith("up_proj.weight")]
    shared = torch.empty_like(items[0][1]).data

    def stream():
        for name, tensor in items:
            yield name, shared.copy_(tensor).data

    with pytest.raises(RefitError, match=f"'{items[1][0]}' came in the memory of '{items[0][0]}'"):
        refit(engine.llm, stream(), expect_kv_scales=False, batch_bytes=shared.nbytes + 1)
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_a_sender_that_clears_its_memory_at_the_end_is_noticed(engine, b, tokens):
    def stream():
        for name, tensor in b.items():
            kept = tensor.clone()
            yield name, kept
            kept.zero_()

    with pytest.raises(RefitError, match="was written to before it was read"):
        refit(engine.llm, stream(), expect_kv_scales=False)
    assert engine.greedy(PROMPTS) == tokens["a"]


def test_hook_is_called_once_with_the_report(engine, a):
    class Observer:
        reports: list = []

        @hookimpl
        def refit_finished(self, report):
            self.reports.append(report)

    plugins = PluginManager(discover=False)
    plugins.register(Observer())
    report = refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True, plugins=plugins)
    assert Observer.reports == [report]


def test_an_error_of_a_hook_is_logged_because_the_new_weights_serve(engine, b, tokens, monkeypatch):
    class Failing:
        @hookimpl
        def refit_finished(self, report):
            raise OSError("the disk of the log is full")

    manager = PluginManager(discover=False)
    manager.register(Failing())
    logged = []
    monkeypatch.setattr("vllm_fp8rl.refit.client.logger.exception", logged.append)
    report = refit(engine.llm, b.items(), expect_kv_scales=False, plugins=manager)
    assert report.tensors == len(b)
    assert engine.greedy(PROMPTS) == tokens["b"]
    assert logged == ["A plugin's refit_finished failed; the refit itself is complete."]


def changed(tensors: dict[str, torch.Tensor], name: str, value: torch.Tensor | None):
    result = dict(tensors)
    if value is None:
        del result[name]
    else:
        result[name] = value
    return result


def poisoned(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(-1)[7] = value
    return copy


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_refused_and_then_a_complete_refit_serves(engine, a, b, tokens, value):
    bad = changed(b | SCALES, UP, poisoned(b[UP], value))
    with pytest.raises(RefitError, match=f"'{UP}' has NaN or infinite"):
        refit(engine.llm, bad.items(), expect_kv_scales=True, batch_bytes=1 << 18)
    with pytest.raises(RefitError, match="half-updated"):
        engine.greedy(PROMPTS)
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["b"]


@pytest.mark.parametrize("name", [UP, "model.norm.weight", "lm_head.weight"])
def test_values_that_the_engine_could_not_hold(engine, b, tokens, name):
    """Codes of 3.4e38 times their scale are infinite in float32, in which kernels multiply."""
    huge = b[name].float()
    huge.view(-1)[3] = -3.4e38
    message = rf"'{name}' has values beyond 3\.2\d*e\+38, the largest that the engine can hold"
    with pytest.raises(RefitError, match=message):
        refit(engine.llm, [(name, huge)], expect_kv_scales=False)
    with pytest.raises(RefitError, match=f"{message}; it was not loaded"):
        engine.model.load_weights([(name, huge)])
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([(UP, None)], f"'{UP}' is no tensor but 'NoneType'; send torch tensors"),
        ([(UP, np.ones(3))], f"'{UP}' is no tensor but 'ndarray'; send torch tensors"),
        ([(UP, torch.ones(512, 256).to_sparse())], r"layout torch\.sparse_coo; send its to_dense"),
        ([(UP, torch.ones(512, 256, device="meta"))], "has no values .*'meta'"),
        ([(UP, TwoTensor(torch.ones(512, 256), torch.ones(512, 256)))], "is a TwoTensor and no"),
        ([(7, torch.ones(512, 256))], "7 is no name of a tensor"),
        ([UP], r"but got 'str'; give state_dict.items\(\)"),
        ([None], "but got 'NoneType'"),
        ({UP: torch.ones(512, 256)}, r"not a mapping; give its items\(\)"),
        (None, "not 'NoneType'"),
    ],
)
def test_what_is_no_tensor_is_refused_in_a_sentence(engine, tokens, stream, message):
    for give in (through_refit, through_a_session):
        with pytest.raises(RefitError, match=message) as raised:
            give(engine, stream)
        assert "\n" not in str(raised.value)
    assert engine.greedy(PROMPTS) == tokens["a"]


@pytest.mark.parametrize("missing", [UP, "model.norm.weight", "lm_head.weight", *list(SCALES)[:1]])
def test_missing_tensor(engine, b, missing):
    with pytest.raises(RefitError, match=f"lacks 1 .*'{missing}'"):
        refit(engine.llm, changed(b | SCALES, missing, None).items(), expect_kv_scales=True)
    with pytest.raises(RefitError, match="half-updated"):
        engine.greedy(PROMPTS)


def test_fp8_codes_without_their_scales(engine, b):
    wire = changed(b, UP, quantize_block(b[UP]).codes)
    with pytest.raises(RefitError, match=f"lacks 1 .*'{UP}_scale_inv'"):
        refit(engine.llm, wire.items(), expect_kv_scales=False)


K0, NORM = "model.layers.0.self_attn.k_scale", "model.norm.weight"
NO_LAYER = "model.layers.9.mlp.up_proj.weight"
K_OF_NO_LAYER = f"model.layers.{LAYERS}.self_attn.k_scale"
K_TO_NO_LAYER = f"'{K_OF_NO_LAYER}' is for a layer that this engine does not have"


def one_bad(value: float) -> torch.Tensor:
    scales = torch.ones(4, 2)
    scales[3, 1] = value
    return scales


BAD_WEIGHT_SCALE = f"'{UP}_scale_inv' has a scale that is 0, negative"
TWICE = r"'model.norm.weight' arrived twice"
BOTH_NAMES = [(K0, torch.ones(1)), (K0.replace("self_attn.", "self_attn.attn."), torch.ones(1))]


@pytest.mark.parametrize(
    ("stream", "kv_scales", "kind", "message"),
    [
        ([(NO_LAYER, torch.ones(2))], False, RefitError, f"no tensor '{NO_LAYER}"),
        ([(UP, torch.ones(3, 5))], False, RefitError, r"\(3, 5\).*\(512, 256\)"),
        ([(UP, torch.ones(512, 256, dtype=torch.int8))], False, RefitError, "dtype torch.int8"),
        ([(NORM, torch.ones(256).to(torch.float8_e4m3fn))], False, RefitError, "float8"),
        ([(f"{UP}_scale_inv", torch.full((4, 2), torch.nan))], False, RefitError, "NaN"),
        *(
            ([(f"{UP}_scale_inv", one_bad(bad))], False, ScaleError, BAD_WEIGHT_SCALE)
            for bad in (0.0, -1.0, 1e36)
        ),
        ([(K0, torch.ones(1))], False, RefitError, "unannounced"),
        *(
            ([(K0, torch.tensor([bad]))], True, ScaleError, K0)
            for bad in (0.0, float("nan"), float("inf"), -1.0)
        ),
        (BOTH_NAMES, True, RefitError, "twice"),
        ([(K_OF_NO_LAYER, torch.ones(1))], True, RefitError, K_TO_NO_LAYER),
        ([(NORM, torch.ones(256).bfloat16())] * 2, False, RefitError, TWICE),
    ],
)
def test_refused_before_anything_is_written(engine, tokens, stream, kv_scales, kind, message):
    with pytest.raises(kind, match=message):
        refit(engine.llm, stream, expect_kv_scales=kv_scales)
    assert engine.greedy(PROMPTS) == tokens["a"]  # still the old weights, still serving


@pytest.mark.parametrize("batch_bytes", [1, 1 << 30])
def test_scales_of_a_weight_that_is_not_fp8(engine, b, batch_bytes):
    wire = [(f"{UP}_scale_inv", torch.ones(4, 2)), (UP, b[UP])]
    for stream in (wire, wire[::-1]):
        with pytest.raises(RefitError, match=rf"'{UP}.*belong to FP8 codes"):
            refit(engine.llm, stream, expect_kv_scales=False, batch_bytes=batch_bytes)


def test_a_prefix_cache_that_cannot_be_reset_leaves_a_refusal(engine, b, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **options: False)
        with pytest.raises(RefitError, match="could not reset its prefix cache"):
            refit(engine.llm, b.items(), expect_kv_scales=False)
    with pytest.raises(RefitError, match="half-updated"):
        engine.greedy(PROMPTS)


def test_session_guards_the_model_itself(engine, a, b, tokens):
    with (
        pytest.raises(KeyboardInterrupt),
        RefitSession(engine.model, expect_kv_scales=False) as session,
    ):
        session.load(list(b.items())[:3])
        with pytest.raises(RefitError, match="already under way"):
            RefitSession(engine.model, expect_kv_scales=False).__enter__()
        raise KeyboardInterrupt
    with pytest.raises(RefitError, match="half-updated"):
        engine.greedy(PROMPTS)  # past the front door, which knows nothing of this session
    with pytest.raises(RefitError, match="in flight"):
        refit(engine.llm, a.items(), expect_kv_scales=False)
    drop_requests(engine.llm)
    with RefitSession(engine.model, expect_kv_scales=False) as session:
        session.load(a.items())
    assert session.report is not None and session.report.kv_scales == 0
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["a"]


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

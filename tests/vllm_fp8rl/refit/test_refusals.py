"""Streams that are refused and refits that fail: the old weights, or a refusal, never a mixture.

Plain loads: patches/test_loads.py; files: receiver/test_files.py; a rank that dies: tp_refit.py;
any fault at any place of a stream: tests/fuzz/test_refit_streams.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fp8rl.errors import Fp8RLError, RefitError, ScaleError
from fp8rl.numerics import quantize_block
from support.engine import LAYERS, PROMPTS, SCALES, Engine
from vllm_fp8rl.refit import RefitSession, refit
from vllm_fp8rl.refit.transport import Sender, place
from vllm_fp8rl.storage import block_grid as grid_module

pytestmark = pytest.mark.usefixtures("restored")

WAYS: dict[str, Callable[[Engine, Any], object]] = {
    "refit": lambda e, stream: refit(e.llm, stream, expect_kv_scales=False),
    "refit with KV scales": lambda e, stream: refit(e.llm, stream, expect_kv_scales=True),
    "load_weights": lambda e, stream: e.model.load_weights(list(stream)),
    "load_weights of a stream": lambda e, stream: e.model.load_weights(iter(stream)),
}
REFIT, ANNOUNCED, LOAD, STREAM = ([way] for way in WAYS)
ALL = [*REFIT, *LOAD, *STREAM]

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
UP_SCALE = f"{UP}_scale_inv"
K0 = "model.layers.0.self_attn.k_scale"
K0_BOTH = [(K0, torch.ones(1)), (K0.replace("self_attn.", "self_attn.attn."), torch.ones(1))]
NO_LAYER = "model.layers.9.mlp.up_proj.weight"
K_OF_NO_LAYER = f"model.layers.{LAYERS}.self_attn.k_scale"
NOT_FINITE = "has NaN or infinite values"
TOO_LARGE = r"has values beyond 3\.2\d*e\+38, the largest that the engine can hold"
ONES, NORM_ONES = torch.ones(512, 256), torch.ones(256)
E4M3 = torch.float8_e4m3fn


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight of ``UP`` with one number in it."""
    tensor = torch.zeros(512, 256)
    tensor[3, 4] = value
    return tensor.to(dtype)


CASES: list[tuple[list[str], Any, type[Exception], str]] = [
    (ALL, [("nothing.like.it", torch.ones(2))], Exception, "nothing"),
    (ALL, [(UP, torch.ones(3, 5))], Exception, r"\(3, 5\)"),
    (ALL, [(UP, ONES.to(torch.int8))], Exception, r"torch\.int8"),
    # vLLM's loaders would cast these to a norm's dtype in silence.
    (ALL, [(NORM, NORM_ONES.bool())], Exception, r"torch\.bool"),
    (LOAD, [(K0, torch.ones(1, dtype=torch.int64))], Exception, r"torch\.int64"),
    (ALL, [(NORM, NORM_ONES * torch.nan)], RefitError, f"'{NORM}' {NOT_FINITE}"),
    (ALL, [(UP, one(-torch.inf))], RefitError, f"'{UP}' {NOT_FINITE}"),
    (ALL, [(UP, one(torch.nan, E4M3))], RefitError, f"'{UP}' {NOT_FINITE}"),
    # Codes of 3.4e38 times their scale are infinite in float32, in which kernels multiply.
    (ALL, [(UP, one(-3.4e38))], RefitError, f"'{UP}' {TOO_LARGE}"),
    (ALL, [(NORM, NORM_ONES * 3.4e38)], RefitError, f"'{NORM}' {TOO_LARGE}"),
    (LOAD, [(NORM, NORM_ONES), (UP, one(torch.nan))], RefitError, NOT_FINITE),
    (LOAD, K0_BOTH, ScaleError, "both the k scale of layer 0"),
    (REFIT, [(NO_LAYER, torch.ones(2))], RefitError, f"no tensor '{NO_LAYER}"),
    (REFIT, [(NORM, NORM_ONES.to(E4M3))], RefitError, "float8"),
    (REFIT, [(NORM, NORM_ONES), (NORM, NORM_ONES.clone())], RefitError, f"'{NORM}' arrived twice"),
    (REFIT, [(UP_SCALE, torch.full((4, 2), torch.nan))], RefitError, "NaN"),
    (REFIT, [(UP_SCALE, torch.zeros(4, 2))], ScaleError, "has a scale that is 0, negative"),
    (REFIT, [(UP_SCALE, torch.ones(4, 2)), (UP, ONES)], RefitError, "belong to FP8 codes"),
    (REFIT, [(UP, ONES), (UP_SCALE, torch.ones(4, 2))], RefitError, "belong to FP8 codes"),
    (REFIT, [(UP, None)], RefitError, f"'{UP}' is no tensor but 'NoneType'; send torch tensors"),
    (REFIT, [(UP, np.ones(3))], RefitError, f"'{UP}' is no tensor but 'ndarray'; send torch"),
    (REFIT, [(UP, ONES.to_sparse())], RefitError, r"layout torch\.sparse_coo; send its to_dense"),
    (REFIT, [(UP, ONES.to("meta"))], RefitError, "has no values .*'meta'"),
    (REFIT, [(UP, TwoTensor(ONES, ONES))], RefitError, "is a TwoTensor and no"),
    (REFIT, [(7, ONES)], RefitError, "7 is no name of a tensor"),
    (REFIT, [UP], RefitError, r"but got 'str'; give state_dict.items\(\)"),
    (REFIT, {UP: ONES}, RefitError, r"not a mapping; give its items\(\)"),
    (REFIT, None, RefitError, "not 'NoneType'"),
    (REFIT, [(K0, torch.ones(1))], RefitError, "unannounced"),
    (ANNOUNCED, [(K0, torch.zeros(1))], ScaleError, K0),
    (ANNOUNCED, K0_BOTH, RefitError, "twice"),
    (ANNOUNCED, [(K_OF_NO_LAYER, torch.ones(1))], RefitError, f"'{K_OF_NO_LAYER}' is for a layer"),
]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("way", "stream", "error", "message"),
    [(way, stream, *rest) for ways, stream, *rest in CASES for way in ways],
)
def test_refused(engine, intact, tokens, way, stream, error, message):
    with pytest.raises(error, match=message) as raised:
        WAYS[way](engine, stream)
    assert "\n" not in str(raised.value)
    assert engine.greedy(PROMPTS[:1], 2) == [tokens["a"][0][:2]]
    assert intact()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *((dict.fromkeys([name]), f"lacks 1 .*'{name}'") for name in (UP, "lm_head.weight", K0)),
        ({UP: quantize_block(ONES).codes}, f"lacks 1 .*'{UP}_scale_inv'"),
        ({UP: one(torch.inf)}, f"'{UP}' {NOT_FINITE}"),
    ],
)
def test_a_fault_after_a_write_closes_the_engine_until_a_complete_refit(
    engine, b, tokens, change, message
):
    """``change``: other tensors; None for one that is left out."""
    sent = [item for item in (b | SCALES | change).items() if item[1] is not None]
    with pytest.raises(RefitError, match=message):
        refit(engine.llm, sent, expect_kv_scales=True, batch_bytes=1 << 18)
    engine.refuses(RefitError, "half-updated.*refit the engine")
    refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True)
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_codes_that_were_refused_may_come_in_bf16(engine, b, tokens):
    """As the error says, in the same refit."""
    with RefitSession(engine.model, expect_kv_scales=True) as session:
        with pytest.raises(RefitError, match="infinite"):
            session.load([(UP, ONES.to(E4M3)), (UP_SCALE, torch.full((4, 2), torch.inf))])
        session.load(list((b | SCALES).items()))
    engine.llm.reset_prefix_cache()
    assert engine.greedy(PROMPTS) == tokens["b"]


def test_a_session_needs_its_block(engine, a):
    with pytest.raises(Fp8RLError, match="context manager"):
        RefitSession(engine.model, expect_kv_scales=False).load(a.items())


def exhausted(*args: object, **options: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")


@pytest.mark.parametrize("place_of_it", ["checks", "first write", "later write"])
def test_out_of_memory(engine, intact, b, monkeypatch, place_of_it):
    """A GPU allocates where tensors come from the host or are strided: here, by a failure there."""
    quantize, left = grid_module.quantize_blocks, [3 if place_of_it == "later write" else 0]

    def failing(*args: Any) -> None:
        if not left[0]:
            exhausted()
        left[0] -= 1
        quantize(*args)

    with monkeypatch.context() as patch:
        if place_of_it == "checks":
            patch.setattr("vllm_fp8rl.refit.receiver.session.start_finite_check", exhausted)
        else:
            patch.setattr(grid_module, "quantize_blocks", failing)
        with pytest.raises(RefitError, match=r"No memory was left .*2\.00 MiB.*smaller batches"):
            refit(engine.llm, (b | SCALES).items(), expect_kv_scales=True, batch_bytes=1 << 17)
    if place_of_it == "checks":
        assert intact()
    else:
        engine.refuses(RefitError, "half-updated.*refit the engine")


def test_out_of_memory_at_staging_names_the_remedy(monkeypatch):
    """A sender stages GPU tensors for workers in other processes, before it sends any."""
    monkeypatch.setattr("vllm_fp8rl.refit.transport.torch.empty", exhausted)
    with pytest.raises(RefitError, match=r"on cpu for a staging buffer of 256 MiB, .*smaller"):
        Sender([place()], 256 << 20)._make_staging(torch.device("cpu"))


def test_a_prefix_cache_that_cannot_be_reset_leaves_a_refusal(engine, b, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda **options: False)
        with pytest.raises(RefitError, match="could not reset its prefix cache"):
            refit(engine.llm, b.items(), expect_kv_scales=False)
    engine.refuses(RefitError, "half-updated")


def test_requests_in_flight_are_refused_before_a_worker_hears_of_the_refit(
    engine, intact, b, monkeypatch
):
    live = engine.llm.llm_engine
    own = live.add_request
    with monkeypatch.context() as patch:
        patch.setattr(live, "add_request", own)  # as of somebody who counts requests
        patch.setattr(live, "has_unfinished_requests", lambda: True)
        with pytest.raises(RefitError, match="has requests in flight"):
            refit(engine.llm, b.items(), expect_kv_scales=True)
        assert vars(live)["add_request"] is own
    assert intact()
    assert engine.greedy(PROMPTS[:1], 1)

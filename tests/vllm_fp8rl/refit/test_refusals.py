"""Streams that are refused: before a write the old weights serve, after one nothing does.

Plain loads: patches/test_loads.py; files: receiver/test_files.py.
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
from vllm_fp8rl.refit.receiver.worker import STEPS, read_answer
from vllm_fp8rl.refit.transport import pack

pytestmark = pytest.mark.usefixtures("restored")
Tensors = dict[str, torch.Tensor]

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
    ("sent", "message"),
    [
        ({"model.unknown": torch.ones(8)}, "no tensor 'model.unknown'"),
        ({UP: torch.ones(3, 5)}, r"\(3, 5\)"),
        ({UP: torch.ones(512, 256, dtype=torch.uint16)}, r"torch\.uint16"),
        ({NORM: NORM_ONES, K0: torch.ones(1)}, "came unannounced"),
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

"""Streams that are refused, by every way in, before anything is written: the old weights serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from fp8rl.errors import RefitError, ScaleError
from support.engine import LAYERS, PROMPTS, Engine
from vllm_fp8rl.refit import RefitSession, refit

pytestmark = pytest.mark.usefixtures("restored")


def by_session(engine: Engine, stream: Any, scales: bool) -> None:
    with RefitSession(engine.model, expect_kv_scales=scales) as session:
        session.load(stream)


WAYS: dict[str, Callable[[Engine, Any, bool], object]] = {
    "refit": lambda engine, stream, scales: refit(
        engine.llm, stream, expect_kv_scales=scales, batch_bytes=1 << 30
    ),
    "session": by_session,
    "load_weights": lambda engine, stream, scales: engine.model.load_weights(list(stream)),
    "load_weights of a stream": lambda engine, stream, scales: engine.model.load_weights(
        iter(stream)
    ),
}
REFITS = ("refit", "session")
LOADS = ("load_weights", "load_weights of a stream")
ALL = (*REFITS, *LOADS)

UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
UP_SCALE = f"{UP}_scale_inv"
K0 = "model.layers.0.self_attn.k_scale"
K0_BOTH = [(K0, torch.ones(1)), (K0.replace("self_attn.", "self_attn.attn."), torch.ones(1))]
NO_LAYER = "model.layers.9.mlp.up_proj.weight"
K_OF_NO_LAYER = f"model.layers.{LAYERS}.self_attn.k_scale"
NOT_FINITE = "has NaN or infinite values"
TOO_LARGE = r"has values beyond 3\.2\d*e\+38, the largest that the engine can hold"
ONES = torch.ones(512, 256)


def one(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A weight of ``UP`` with one number in it."""
    tensor = torch.zeros(512, 256)
    tensor[3, 4] = value
    return tensor.to(dtype)


CASES: list[tuple[tuple[str, ...], Any, type[Exception], str]] = [
    (ALL, [("nothing.like.it", torch.ones(2))], Exception, "nothing"),
    (ALL, [(UP, torch.ones(3, 5))], Exception, r"\(3, 5\)"),
    (ALL, [(UP, ONES.to(torch.int8))], Exception, r"torch\.int8"),
    (ALL, [(NORM, torch.full((256,), torch.nan))], RefitError, f"'{NORM}' {NOT_FINITE}"),
    (ALL, [(UP, one(torch.inf))], RefitError, f"'{UP}' {NOT_FINITE}"),
    (ALL, [(UP, one(-torch.inf))], RefitError, f"'{UP}' {NOT_FINITE}"),
    (ALL, [(UP, one(torch.nan, torch.float8_e4m3fn))], RefitError, f"'{UP}' {NOT_FINITE}"),
    # Codes of 3.4e38 times their scale are infinite in float32, in which kernels multiply.
    (ALL, [(UP, one(-3.4e38))], RefitError, f"'{UP}' {TOO_LARGE}"),
    (ALL, [(NORM, torch.full((256,), 3.4e38))], RefitError, f"'{NORM}' {TOO_LARGE}"),
    (LOADS[:1], [(NORM, torch.ones(256)), (UP, one(torch.nan))], RefitError, NOT_FINITE),
    (REFITS, [(NO_LAYER, torch.ones(2))], RefitError, f"no tensor '{NO_LAYER}"),
    (REFITS, [(NORM, torch.ones(256).to(torch.float8_e4m3fn))], RefitError, "float8"),
    (
        REFITS,
        [(NORM, torch.ones(256).bfloat16()), (NORM, torch.ones(256).bfloat16())],
        RefitError,
        f"'{NORM}' arrived twice",
    ),
    (REFITS, [(UP_SCALE, torch.full((4, 2), torch.nan))], RefitError, "NaN"),
    (REFITS, [(UP_SCALE, torch.zeros(4, 2))], ScaleError, "has a scale that is 0, negative"),
    (REFITS[:1], [(UP_SCALE, torch.ones(4, 2)), (UP, ONES)], RefitError, "belong to FP8 codes"),
    (REFITS[:1], [(UP, ONES), (UP_SCALE, torch.ones(4, 2))], RefitError, "belong to FP8 codes"),
    (LOADS[:1], K0_BOTH, ScaleError, "both the k scale of layer 0"),
    (REFITS, [(UP, None)], RefitError, f"'{UP}' is no tensor but 'NoneType'; send torch tensors"),
    (REFITS, [(UP, np.ones(3))], RefitError, f"'{UP}' is no tensor but 'ndarray'; send torch"),
    (REFITS, [(UP, ONES.to_sparse())], RefitError, r"layout torch\.sparse_coo; send its to_dense"),
    (REFITS, [(UP, ONES.to("meta"))], RefitError, "has no values .*'meta'"),
    (REFITS, [(UP, TwoTensor(ONES, ONES))], RefitError, "is a TwoTensor and no"),
    (REFITS, [(7, ONES)], RefitError, "7 is no name of a tensor"),
    (REFITS, [UP], RefitError, r"but got 'str'; give state_dict.items\(\)"),
    (REFITS, [None], RefitError, "but got 'NoneType'"),
    (REFITS, {UP: ONES}, RefitError, r"not a mapping; give its items\(\)"),
    (REFITS, None, RefitError, "not 'NoneType'"),
]
ANNOUNCED: list[tuple[Any, bool, type[Exception], str]] = [
    ([(K0, torch.ones(1))], False, RefitError, "unannounced"),
    ([(K0, torch.zeros(1))], True, ScaleError, K0),
    (K0_BOTH, True, RefitError, "twice"),
    (
        [(K_OF_NO_LAYER, torch.ones(1))],
        True,
        RefitError,
        f"'{K_OF_NO_LAYER}' is for a layer that this engine does not have",
    ),
]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("way", "stream", "scales", "error", "message"),
    [
        *((way, stream, False, *rest) for ways, stream, *rest in CASES for way in ways),
        *((way, *row) for row in ANNOUNCED for way in REFITS),
    ],
)
def test_refused(
    engine: Engine,
    intact: Callable[[], bool],
    tokens: dict[str, list[list[int]]],
    way: str,
    stream: Any,
    scales: bool,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message) as raised:
        WAYS[way](engine, stream, scales)
    assert "\n" not in str(raised.value)
    assert engine.greedy(PROMPTS, 2) == [answer[:2] for answer in tokens["a"]]
    assert intact()

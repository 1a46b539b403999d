"""Refits with requests in flight on a GPU: in eager mode, and with decode steps in full graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

from fp8rl import Recipe
from fp8rl.errors import RefitError
from fp8rl.kv_scales import parse_scale_name
from support.gpu_engine import QUICK, GpuEngine, make_checkpoints, refit_tensors, start_engine
from support.in_flight import (
    LENGTH,
    PROMPTS,
    begin,
    ended,
    in_flight,
    last,
    one_step,
    preemptions,
    put,
    recompute,
)
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.refit import drop_requests, refit

Weights = dict[str, torch.Tensor]
RECIPE = Recipe.from_dict({"kv_cache": {"recalibrate": "grow"}})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module", params=[{"enforce_eager": True}, QUICK], ids=["eager", "graphs"])
def engine(checkpoints: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[GpuEngine]:
    engine = start_engine(checkpoints["a"], RECIPE, **request.param)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def a(engine: GpuEngine, checkpoints: dict[str, Path]) -> Iterator[Weights]:
    """Tensors of ``a`` with its KV scales, which the engine has."""
    tensors = refit_tensors(checkpoints["a"], RECIPE)
    refit(engine.llm, tensors.items(), expect_kv_scales=True)
    yield tensors
    drop_requests(engine.llm)


def grown(tensors: Weights) -> Weights:
    return {n: t * 4 if parse_scale_name(n) else t for n, t in tensors.items()}


def test_requests_go_on_where_no_scale_has_changed(engine: GpuEngine, a: Weights) -> None:
    in_flight(engine)
    undisturbed = ended(engine)
    in_flight(engine)
    put(engine, a)
    assert preemptions(engine) == 0
    rest = ended(engine)
    assert [each.tokens for each in rest] == [each.tokens for each in undisturbed]
    assert len(rest[0].tokens) == LENGTH


def test_where_a_scale_grows_requests_compute_their_keys_again(
    engine: GpuEngine, a: Weights, checkpoints: dict[str, Path]
) -> None:
    b: Any = grown(refit_tensors(checkpoints["b"], RECIPE))
    said = in_flight(engine)
    put(engine, b)
    assert state_of(engine.model).guard.cache_outdated
    recompute(engine)
    found = last(one_step(engine))
    drop_requests(engine.llm)
    refit(engine.llm, b.items(), expect_kv_scales=True)
    begin(engine, [p + each.tokens for p, each in zip(PROMPTS, said, strict=True)], 1)
    assert torch.allclose(found, last(one_step(engine)), rtol=0, atol=1e-3)


def test_old_codes_with_new_scales_are_refused(engine: GpuEngine, a: Weights) -> None:
    in_flight(engine)
    put(engine, grown(a))
    with pytest.raises(RefitError, match="older KV scales"):
        one_step(engine)

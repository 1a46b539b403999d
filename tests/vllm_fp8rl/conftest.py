"""One real engine for the whole session."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError
from fp8rl.recipe import KVCache, Pins

# Before anything that imports vLLM: it sets the environment that vLLM reads at import.
from support.engine import (
    KV_SCALE,
    PROMPTS,
    SCALES,
    Engine,
    keep_process_groups,
    load_tensors,
    make_checkpoint,
    same_state,
    start_engine,
)
from support.tiny import make_moe_checkpoint
from vllm_fp8rl.compat import require_cpu_router

PLAIN = KVCache(dtype="auto")
KINDS = {
    "plain cache": Recipe(kv_cache=PLAIN),
    "pins": Recipe(pins=Pins(layers=(-1,), kinds=("down_proj",))),
    "experts": Recipe(kv_cache=PLAIN),
    "experts in BF16": Recipe(kv_cache=PLAIN, pins=Pins(kinds=("experts",))),
}
"""Recipes of engines that several tests share, beside the session's with the default one."""


@pytest.fixture(scope="session")
def experts_on_a_cpu() -> None:
    """Refuse the test by the sentence that a user reads, with a vLLM before 0.30."""
    require_cpu_router()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one shape, ``a`` and ``b``."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, seed) for seed, name in enumerate("ab")}


@pytest.fixture(scope="session")
def engine(checkpoints: dict[str, Path]) -> Iterator[Engine]:
    """The session's engine, of ``a``; leave it with ``a`` and every scale at ``KV_SCALE``."""
    from vllm_fp8rl.calibration import set_uncalibrated_kv_scales

    started = start_engine(checkpoints["a"], Recipe())
    gc.freeze()  # each further engine collects garbage several times: not among all of vLLM's
    set_uncalibrated_kv_scales(started.model, KV_SCALE)
    yield started
    started.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="session")
def other_engine(engine: Engine) -> Callable[..., Engine]:
    """``other_engine(path, recipe, **llm_arguments)``; scales are set unless ``scaled=False``."""
    from vllm_fp8rl.calibration import set_uncalibrated_kv_scales

    def start(path: Path, recipe: Recipe, *, scaled: bool = True, **changes: Any) -> Engine:
        dtype = torch.get_default_dtype()
        try:
            started = start_engine(path, recipe, **changes)
        finally:  # before vLLM 0.30 an engine that is refused leaves its own dtype behind
            torch.set_default_dtype(dtype)
        keep_process_groups(started)
        if scaled and recipe.kv_cache.dtype != "auto":
            set_uncalibrated_kv_scales(started.model, KV_SCALE)
        return started

    return start


@pytest.fixture(scope="session")
def expert_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints with experts of 192 columns, of which 64 are padding in vLLM's stacks."""
    root = tmp_path_factory.mktemp("experts")
    return {
        name: make_moe_checkpoint(root / name, seed, moe_intermediate_size=192)
        for seed, name in enumerate("ab")
    }


@pytest.fixture(scope="session")
def shared_engine(
    checkpoints: dict[str, Path],
    expert_checkpoints: dict[str, Path],
    other_engine: Callable[..., Engine],
) -> Callable[[str], Engine]:
    """``shared_engine(kind)``: the one engine of a kind of ``KINDS``, refitted with ``a``."""
    from vllm_fp8rl.calibration import set_uncalibrated_kv_scales
    from vllm_fp8rl.refit import drop_requests, refit

    started: dict[str, Engine] = {}

    def of(kind: str) -> Engine:
        path = (expert_checkpoints if kind.startswith("experts") else checkpoints)["a"]
        if kind not in started:
            started[kind] = other_engine(path, KINDS[kind])
            return started[kind]
        engine = started[kind]
        drop_requests(engine.llm)
        refit(engine.llm, load_tensors(path).items(), expect_kv_scales=False)
        if engine.recipe.kv_cache.has_scales:
            set_uncalibrated_kv_scales(engine.model, KV_SCALE)
            engine.llm.reset_prefix_cache()
        return engine

    return of


@pytest.fixture(scope="module")
def moe_engine(other_engine: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """``other_engine`` for an MoE model.

    vLLM makes the group of expert-parallel ranks with the first engine of a process, and only for
    an MoE model, which the session's is not. One rank is a group of one in every sense.
    """
    from vllm.distributed import parallel_state

    before = parallel_state._EP
    parallel_state._EP = parallel_state.get_tp_group()
    yield other_engine
    parallel_state._EP = before


@pytest.fixture(scope="session")
def a(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Tensors of the checkpoint that the session's engine serves."""
    return load_tensors(checkpoints["a"])


@pytest.fixture(scope="session")
def b(checkpoints: dict[str, Path]) -> dict[str, torch.Tensor]:
    """Tensors of the checkpoint for refits."""
    return load_tensors(checkpoints["b"])


@pytest.fixture(scope="session")
def tokens(
    engine: Engine, other_engine: Callable[..., Engine], checkpoints: dict[str, Path]
) -> dict[str, list[list[int]]]:
    """Answers of fresh engines to ``PROMPTS``: the one of the session and one with ``b``."""
    fresh = other_engine(checkpoints["b"], Recipe())
    said = {"a": engine.greedy(PROMPTS), "b": fresh.greedy(PROMPTS)}
    assert said["a"] != said["b"]
    return said


@pytest.fixture(scope="session")
def intact(engine: Engine) -> Callable[[], bool]:
    """Whether the session's engine holds all that it was started with, and may run."""
    from vllm_fp8rl.refit import require_ready

    state, scales = engine.state(), engine.kv_scales()

    def same() -> bool:
        try:
            require_ready(engine.llm)
        except Fp8RLError:
            return False
        return same_state(state, engine.state()) and engine.kv_scales() == scales

    return same


@pytest.fixture
def restored(
    engine: Engine, intact: Callable[[], bool], a: dict[str, torch.Tensor]
) -> Iterator[None]:
    """After the test the session's engine has ``a`` and ``SCALES``, by a refit where need be."""
    from vllm_fp8rl.calibration import set_uncalibrated_kv_scales
    from vllm_fp8rl.refit import drop_requests, refit

    yield
    drop_requests(engine.llm)
    if intact():
        engine.llm.reset_prefix_cache()
        return
    refit(engine.llm, (a | SCALES).items(), expect_kv_scales=True)
    set_uncalibrated_kv_scales(engine.model, KV_SCALE)  # of queries, which a reload forgets
    engine.llm.reset_prefix_cache()

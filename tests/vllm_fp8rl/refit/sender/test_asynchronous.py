"""Refits of a real AsyncLLM with requests in flight, in a process of its own."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from fp8rl.errors import Fp8RLError, UnsupportedError
from support.cases import names_of
from support.engine import PROMPTS, Engine, load_tensors
from support.processes import answer, run_forked
from vllm_fp8rl.engine.names import EXTENSION
from vllm_fp8rl.quantization.config import Fp8RLConfig
from vllm_fp8rl.refit import refit
from vllm_fp8rl.refit.liveness import ended_by_death
from vllm_fp8rl.refit.sender.asynchronous import _AsyncWorkers, refit_async
from vllm_fp8rl.refit.sender.client import Changes

SCRIPT = Path(__file__).with_name("async_cases.py")
EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.fixture(scope="module")
def failures(
    engine: Engine, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """How each case failed, if it did; what a synchronous engine says is the truth."""
    root = tmp_path_factory.mktemp("asynchronous")
    said: dict[str, Any] = {}
    for name, path in checkpoints.items():
        (root / name).symlink_to(path)
        refit(engine.llm, load_tensors(path).items(), expect_kv_scales=False)
        # One at a time, as they are sent there: sums of a larger batch differ in the last bits.
        said[name] = [engine.greedy([prompt])[0] for prompt in PROMPTS]
        said[f"long_{name}"] = engine.greedy([[7, 8, 9]], 48)[0]
    refit(engine.llm, load_tensors(checkpoints["a"]).items(), expect_kv_scales=False)
    assert said["a"] != said["b"]
    (root / "truth.json").write_text(json.dumps(said))
    return answer(run_forked(SCRIPT, root, timeout=240, folders=(EXAMPLES,)))


@pytest.mark.parametrize("case", names_of(SCRIPT))
def test_refit_async(failures, case):
    assert not failures[case], failures[case]


def test_calls_of_a_synchronous_engine_end_with_its_core():
    from vllm.v1.engine.exceptions import EngineDeadError

    pending: Future[None] = Future()
    core = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=False), utility_results={1: pending}
    )
    with ended_by_death(core):
        with pytest.raises(TimeoutError):
            pending.result(timeout=1.2)
        core.resources.engine_dead = True
        with pytest.raises(EngineDeadError):
            pending.result(timeout=10)


class EngineOfAConfig:
    """An AsyncLLM without an engine core."""

    def __init__(self, extension: str = EXTENSION, **parallel: Any) -> None:
        config = ParallelConfig(worker_extension_cls=extension)
        for name, value in parallel.items():
            setattr(config, name, value)
        self.vllm_config = SimpleNamespace(parallel_config=config, quant_config=Fp8RLConfig())

    async def add_request(self) -> None: ...


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (
            EngineOfAConfig(""),
            {},
            r"by name only; start it with \*\*vllm_fp8rl\.engine_args\(recipe\)",
        ),
        (
            EngineOfAConfig("collections.OrderedDict"),
            {},
            "give its worker extension .*OrderedDict. the base class vllm_fp8rl.refit.RefitMixin",
        ),
        (EngineOfAConfig(data_parallel_size=2), {}, "has 2 engine cores"),
        (None, {"in_flight": "later"}, "in_flight is 'later'; choose one of"),
        (
            None,
            {"weight_version": "1"},
            r"no weight versions; install 0\.32\.0, or leave weight_version out",
        ),
    ],
)
def test_refused(engine, options, message):
    with pytest.raises(Fp8RLError, match=message):
        asyncio.run(refit_async(engine, [], expect_kv_scales=False, **options))


def test_one_engine_core_of_several_behind_an_external_load_balancer_is_served():
    engine: Any = EngineOfAConfig(data_parallel_size=4, data_parallel_external_lb=True)
    assert _AsyncWorkers(engine).session


def test_engines_of_one_config_have_changes_of_their_own(monkeypatch):
    """A complete refit of one must not open the other, whose refit broke off."""
    one, other = EngineOfAConfig(), EngineOfAConfig()
    other.vllm_config = one.vllm_config
    assert Changes.of(one) is Changes.of(one) is not Changes.of(other)
    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM", EngineOfAConfig)
    with pytest.raises(UnsupportedError, match=r"patches '.*\.generate', which this vLLM"):
        Changes.of(EngineOfAConfig())

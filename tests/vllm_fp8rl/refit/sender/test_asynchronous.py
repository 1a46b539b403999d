"""Refits of a real AsyncLLM with requests in flight, in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import ParallelConfig

from fp8rl import Recipe
from fp8rl.errors import Fp8RLError, UnsupportedError
from support.engine import LAYERS, PROMPTS, Engine, load_tensors
from support.processes import answer, run_forked
from vllm_fp8rl.engine.names import EXTENSION
from vllm_fp8rl.quantization.config import Fp8RLConfig
from vllm_fp8rl.refit.liveness import ended_by_death
from vllm_fp8rl.refit.sender.asynchronous import _AsyncWorkers, refit_async
from vllm_fp8rl.refit.sender.client import Changes

SCRIPT = Path(__file__).with_name("async_cases.py")
EXAMPLES = Path(__file__).parents[4] / "examples"
LONG, LENGTH = [7, 8, 9], 48


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path]) -> dict[str, Any]:
    return answer(run_forked(SCRIPT, checkpoints["a"].parent, timeout=240, folders=(EXAMPLES,)))


@pytest.fixture(scope="module")
def truth(
    engine: Engine, other_engine: Callable[..., Engine], checkpoints: dict[str, Path]
) -> dict[str, Any]:
    """What fresh synchronous engines say."""
    said: dict[str, Any] = {}
    for name, live in (("a", engine), ("b", other_engine(checkpoints["b"], Recipe()))):
        # One at a time, as they are sent below: sums of a larger batch differ in the last bits.
        said[name] = [live.greedy([prompt])[0] for prompt in PROMPTS]
        said[f"long_{name}"] = live.greedy([LONG], LENGTH)[0]
    assert said["a"] != said["b"]
    return said


def test_there_and_back(found, truth, checkpoints):
    assert (found["a"], found["b"], found["a_again"]) == (truth["a"], truth["b"], truth["a"])
    assert found["report"] == [len(load_tensors(checkpoints["b"])) + 2 * LAYERS, 2 * LAYERS]


def test_the_mixin_leaves_another_extension_its_methods(found):
    assert found["extension"] == [0]


def test_a_request_without_kv_scales_is_refused_and_ends_no_engine(found):
    """The engine's process ended, so that no remedy helped any more."""
    scale = "model.layers.0.self_attn.k_scale"
    assert found["without_scales"].startswith(f"KV scale '{scale}' was never loaded (")


def test_drain_lets_requests_end_with_the_old_weights(found, truth):
    assert found["drained"] == [truth["long_a"], "length", truth["b"]]


def test_abort_ends_requests_at_once(found, truth):
    tokens, reason = found["aborted"]
    assert reason == "abort"
    assert len(tokens) < LENGTH and tokens == truth["long_a"][: len(tokens)]


def test_keep_goes_on_with_the_new_weights(found):
    old_tokens, rest_is_of_the_new_weights = found["kept"]
    assert 5 <= old_tokens < LENGTH
    assert rest_is_of_the_new_weights is True


def test_spans_tell_which_weights_made_them(found):
    if not found["spans"]:
        pytest.skip("this vLLM has no weight versions")
    before, after = found["spans"]
    assert before[:2] == ["default", 0] and before[2] >= 5
    assert after == ["b", before[2], LENGTH]


def test_continue_goes_on_with_the_codes_it_has(found, truth):
    tokens, reason, _ = found["continued"]
    assert (tokens, reason) == (truth["long_a"], "length")


def test_continue_computes_keys_again_where_a_scale_has_grown(found):
    epoch, old_tokens, rest_is_of_the_new_weights = found["grown"]
    assert epoch == found["continued"][-1] + 1
    assert 5 <= old_tokens < LENGTH
    assert rest_is_of_the_new_weights is True


def test_continue_empties_a_cache_that_was_outdated_before(found, truth):
    before, after_a_calibration, with_grown_scales = found["outdated"]
    assert before == after_a_calibration == truth["b"]
    assert [len(tokens) for tokens in with_grown_scales] == [len(tokens) for tokens in before]


def test_requests_that_come_meanwhile_wait_for_the_new_weights(found, truth):
    assert found["waited"] == truth["a"][0]


def test_a_second_refit_at_the_same_time_is_refused_and_does_no_harm(found):
    assert found["second"].startswith("RefitError: A refit of this engine is already under way")


def test_refused_before_a_write_leaves_the_old_weights(found, truth):
    error, tokens = found["refused"]
    assert error.startswith("RefitError: The engine's model has no tensor 'model.unknown'")
    assert tokens == truth["a"]


def test_broken_off_after_a_write_closes_the_engine_until_a_complete_refit(found, truth):
    error, waiting, refused = found["nan"]
    assert error.startswith("RefitError: 'model.norm.weight' has NaN")
    assert waiting == [[], "abort"]
    assert refused.startswith("RefitError: The weights are half-updated")
    assert found["after_nan"] == truth["b"]


def test_cancellation(found, truth):
    error, refused = found["cancelled"]
    assert error.startswith("CancelledError")
    assert refused.startswith("RefitError: The weights are half-updated")
    early = found["cancelled_early"]
    assert early[0].startswith("CancelledError")
    assert early[1:] == [truth["long_a"], "length", truth["a"]]


def test_a_paused_engine_stays_paused(found, truth):
    assert found["still_paused"] is True
    assert found["resumed"] == truth["b"]


def test_documented_code(found, truth):
    assert found["doc"] == truth["b"]


def test_recipe_for_a_server(found, truth):
    tokens, with_other_scales, again, error, (lacking, paused) = found["http"]
    assert "lacks 1 of the model's tensors: 'model.norm.weight'" in lacking
    assert paused is True
    assert tokens == again == truth["a"] != with_other_scales
    assert "ScaleError" in error and "k_scale' is -1.0" in error


def test_a_killed_engine_core_is_an_error_not_a_wait(found):
    error, refused = found["killed"]
    assert error.startswith("RefitError: Step 'fp8rl_refit_load_batch' of the refit failed on a ")
    assert error.endswith("restart the engine.")
    assert refused.startswith("RefitError: The weights are half-updated")


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
        (
            EngineOfAConfig(
                data_parallel_size=4, data_parallel_size_local=3, data_parallel_hybrid_lb=True
            ),
            {},
            "has 3 engine cores",
        ),
        (None, {"in_flight": "later"}, "in_flight is 'later'; choose one of"),
        (
            None,
            {"weight_version": "1"},
            r"no weight versions; install 0\.32\.0, or leave weight_version out",
        ),
    ],
)
def test_refused(engine: Any, options: dict[str, Any], message: str) -> None:
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

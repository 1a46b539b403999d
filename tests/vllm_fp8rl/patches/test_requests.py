"""What the engine core tells the workers' guards: resets of the cache, requests in flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

from fp8rl.errors import RefitError, UnsupportedError
from support.engine import KV_SCALE, PROMPTS, SCALES, VOCAB, Engine
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.scales import kv_scale_state
from vllm_fp8rl.quantization.checks import check_connector
from vllm_fp8rl.refit import refit, require_ready
from vllm_fp8rl.refit.receiver.worker import read_answer

LONG = [(13 * i) % (VOCAB - 5) + 5 for i in range(200)]  # more than a block of the cache
OTHER_SCALES = dict.fromkeys(SCALES, 0.5)


def rpc(engine: Engine, method: str, *args: object) -> Any:
    """Take one of our steps by name, as an engine behind HTTP does."""
    return read_answer(engine.llm.collective_rpc(method, args=args)[0])


def start_request(engine: Engine, name: str = "flying") -> None:
    """A request that has its first tokens and has not ended."""
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": LONG}, sampling)
    for _ in range(3):
        engine.llm.llm_engine.step()


def end_requests(engine: Engine) -> list[int]:
    tokens: list[int] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens


@pytest.mark.usefixtures("restored")
def test_steps_are_refused_while_requests_are_in_flight(engine):
    """New scales must not take effect under a request: its cached codes are of the old ones."""
    (expected,) = engine.greedy([LONG], 20)
    engine.llm.reset_prefix_cache()
    before = kv_scale_state(engine.model)
    start_request(engine)
    for method, *args in (
        ("fp8rl_set_kv_scales", OTHER_SCALES),
        ("fp8rl_observe_kv", {}),
        ("fp8rl_refit_begin", "trainer", True),
    ):
        with pytest.raises(RefitError, match=rf"{method} was refused.*requests in flight.*pause"):
            rpc(engine, method, *args)
    assert kv_scale_state(engine.model) == before
    assert end_requests(engine) == expected


@pytest.mark.usefixtures("restored")
def test_new_scales_shut_the_engine_until_the_cache_is_empty(engine):
    """Also where a reset answers False, which goes unseen."""
    engine.greedy([LONG])
    rpc(engine, "fp8rl_set_kv_scales", dict.fromkeys(SCALES, KV_SCALE))  # nothing new
    require_ready(engine.llm)
    start_request(engine)
    core = engine.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    rpc(engine, "fp8rl_set_kv_scales", OTHER_SCALES)
    assert not engine.llm.reset_prefix_cache()  # the request holds its blocks
    with pytest.raises(RefitError, match=r"cache may hold codes of older KV scales.*True"):
        rpc(engine, "fp8rl_refit_check")
    assert engine.llm.reset_prefix_cache(reset_running_requests=True)
    rpc(engine, "fp8rl_refit_check")
    core.resume_scheduler()
    assert len(end_requests(engine)) == 20


@pytest.mark.usefixtures("restored")
def test_a_refit_by_steps_waits_for_the_cache(engine, b):
    """Where the caller's ``reset_prefix_cache`` is forgotten there are keys of the old weights."""
    old = engine.greedy([LONG])
    rpc(engine, "fp8rl_refit_begin", "trainer", True)
    rpc(engine, "fp8rl_refit_load_batch", "trainer", list((b | SCALES).items()))
    assert rpc(engine, "fp8rl_refit_finish", "trainer")["kv_scales"] == len(SCALES)
    engine.refuses(RefitError, r"cache may hold keys of older weights")
    assert engine.greedy([LONG]) != old


@pytest.mark.usefixtures("restored")
def test_vllms_reset_of_weights_shuts_the_engine(engine, a):
    """An engine of zeros would serve on; ``/weight_checker`` calls it with ``reset``."""
    worker = engine.llm.llm_engine.model_executor.driver_worker.worker
    if not hasattr(worker, "reset_weights"):
        pytest.skip("this vLLM has no reset_weights")
    tokens, scales = engine.greedy(PROMPTS), kv_scale_state(engine.model)
    engine.llm.collective_rpc("reset_weights")
    engine.refuses(RefitError, r"reset_weights or a level-2 sleep discarded 'model\.")
    with pytest.raises(RefitError, match="lacks"):
        refit(engine.llm, list((a | SCALES).items())[3:], expect_kv_scales=True)
    refit(engine.llm, a.items(), expect_kv_scales=False)  # the scales come back too
    assert engine.greedy(PROMPTS) == tokens
    assert kv_scale_state(engine.model) == scales


@pytest.fixture
def no_connector_afterwards() -> Iterator[None]:
    """vLLM keeps one connector a process, which later engines would take for theirs."""
    yield
    ensure_kv_transfer_shutdown()


@pytest.mark.usefixtures("no_connector_afterwards")
def test_a_kv_connector_forgets_old_keys(shared_engine, other_engine, checkpoints, b, tmp_path):
    """A reset of the prefix cache alone would leave its connector's."""
    plain = shared_engine("plain cache")
    refit(plain.llm, b.items(), expect_kv_scales=False)
    expected = plain.greedy([LONG])
    transfer = KVTransferConfig(
        kv_connector="ForgetfulConnector",
        kv_connector_module_path="support.forgetful_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    keeping = other_engine(checkpoints["a"], plain.recipe, kv_transfer_config=transfer)
    keeping.greedy([LONG])
    assert any(tmp_path.iterdir()), "the connector has kept nothing"
    keeping.model.load_weights(b.items())
    keeping.llm.reset_prefix_cache()
    assert keeping.greedy([LONG]) != expected, "the naive way would have sufficed"
    refit(keeping.llm, b.items(), expect_kv_scales=False)
    assert keeping.greedy([LONG]) == expected
    state_of(keeping.model).guard.outdate_cache("a test's keys")
    keeping.llm.reset_prefix_cache()
    with pytest.raises(RefitError, match=r"a test's keys.*reset_connector=True"):
        require_ready(keeping.llm)
    keeping.llm.reset_prefix_cache(reset_connector=True)
    require_ready(keeping.llm)


def test_connectors_that_cannot_forget_are_refused():
    names = ("OffloadingConnector", "NixlConnector")
    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    alone, nested = (
        KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=more)
        for name, more in (("NixlConnector", {}), ("MultiConnector", {"connectors": parts}))
    )
    for config in (alone, nested):
        with pytest.raises(UnsupportedError, match=r"'NixlConnector' has no reset_cache.*Offload"):
            check_connector(config)
    check_connector(None)
    check_connector(KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"))

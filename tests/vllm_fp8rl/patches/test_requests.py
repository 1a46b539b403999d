"""What the engine core tells the workers' guards: resets of the cache, requests in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.errors import RefitError, UnsupportedError
from fp8rl.kv_scales import scale_names
from fp8rl.recipe import KVCache

pytest.importorskip("vllm")
from vllm.config import KVTransferConfig

from support.engine import KV_SCALE, LAYERS, VOCAB, Engine, load_tensors
from vllm_fp8rl.engine.rank_state import state_of
from vllm_fp8rl.kv.scales import kv_scale_state
from vllm_fp8rl.quantization.checks import check_connector
from vllm_fp8rl.refit import drop_requests, refit, require_ready
from vllm_fp8rl.refit.receiver.worker import read_answer

PROMPTS = [[5, 6, 7, 8], [9] * 40]
LONG = [(13 * i) % (VOCAB - 5) + 5 for i in range(200)]  # more than a block of the cache
NAMES = scale_names(LAYERS, ("k", "v"))
SCALES = {name: torch.tensor(KV_SCALE) for name in NAMES}


@pytest.fixture(scope="module")
def served(
    engine: Engine, other_engine: Callable[..., Engine], checkpoints: dict[str, Path]
) -> Engine:
    """An engine that takes our steps by name, as one behind HTTP does."""
    return other_engine(checkpoints["a"], Recipe())


@pytest.fixture(scope="module")
def weights(checkpoints: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: load_tensors(path) | SCALES for name, path in checkpoints.items()}


@pytest.fixture(autouse=True)
def leave_it_as_it_was(request: pytest.FixtureRequest, weights: dict) -> Iterator[None]:
    yield
    if "served" in request.fixturenames:
        served = request.getfixturevalue("served")
        drop_requests(served.llm)
        refit(served.llm, weights["a"].items(), expect_kv_scales=True)


def rpc(engine: Engine, method: str, *args: object) -> Any:
    return read_answer(engine.llm.collective_rpc(method, args=args)[0])


def start_request(engine: Engine, name: str = "flying") -> None:
    """A request that has its first tokens and has not ended."""
    from vllm import SamplingParams

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


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("fp8rl_set_kv_scales", (dict.fromkeys(NAMES, 0.5),)),
        ("fp8rl_observe_kv", ({},)),
        ("fp8rl_refit_begin", ("trainer", True)),
    ],
)
def test_steps_are_refused_while_requests_are_in_flight(
    served: Engine, method: str, args: tuple
) -> None:
    """Fails where new scales take effect under a request: its cached codes are of the old ones."""
    (expected,) = served.greedy([LONG], 20)
    served.llm.reset_prefix_cache()
    before = kv_scale_state(served.model)
    start_request(served)
    with pytest.raises(RefitError, match=rf"{method} was refused.*requests in flight.*pause"):
        rpc(served, method, *args)
    assert kv_scale_state(served.model) == before
    assert end_requests(served) == expected


def test_new_scales_shut_the_engine_until_the_cache_is_empty(served: Engine) -> None:
    """Fails where a reset that answers False goes unseen."""
    start_request(served)
    core = served.llm.llm_engine.engine_core.engine_core
    core.pause_scheduler("keep", clear_cache=False)
    rpc(served, "fp8rl_set_kv_scales", dict.fromkeys(NAMES, 0.5))
    assert not served.llm.reset_prefix_cache()  # the request holds its blocks
    with pytest.raises(RefitError, match=r"cache may hold codes of older KV scales.*True"):
        rpc(served, "fp8rl_refit_check")
    assert served.llm.reset_prefix_cache(reset_running_requests=True)
    rpc(served, "fp8rl_refit_check")
    core.resume_scheduler()
    assert len(end_requests(served)) == 20


def test_the_same_scales_again_shut_nothing(served: Engine) -> None:
    served.greedy([LONG])
    rpc(served, "fp8rl_set_kv_scales", dict.fromkeys(NAMES, KV_SCALE))
    require_ready(served.llm)
    drop_requests(served.llm)
    rpc(served, "fp8rl_set_kv_scales", dict.fromkeys(NAMES, 0.5))  # nothing is cached
    require_ready(served.llm)


def test_a_refit_by_steps_waits_for_the_cache(served: Engine, weights: dict) -> None:
    """Fails where the caller's ``reset_prefix_cache`` is forgotten: keys of the old weights."""
    old = served.greedy([LONG])
    rpc(served, "fp8rl_refit_begin", "trainer", True)
    rpc(served, "fp8rl_refit_load_batch", "trainer", list(weights["b"].items()))
    assert rpc(served, "fp8rl_refit_finish", "trainer")["kv_scales"] == len(NAMES)
    served.refuses(RefitError, r"cache may hold keys of older weights")
    assert served.greedy([LONG]) != old


def test_vllms_reset_of_weights_shuts_the_engine(served: Engine, weights: dict) -> None:
    """Fails where an engine of zeros serves on; ``/weight_checker`` calls it with ``reset``."""
    worker = served.llm.llm_engine.model_executor.driver_worker.worker
    if not hasattr(worker, "reset_weights"):
        pytest.skip("this vLLM has no reset_weights")
    tokens, scales = served.greedy(PROMPTS), kv_scale_state(served.model)
    served.llm.collective_rpc("reset_weights")
    served.refuses(RefitError, r"reset_weights or a level-2 sleep discarded 'model\.")
    with pytest.raises(RefitError, match="lacks"):
        refit(served.llm, list(weights["a"].items())[3:], expect_kv_scales=True)
    only_weights = {n: t for n, t in weights["a"].items() if n not in SCALES}
    refit(served.llm, only_weights.items(), expect_kv_scales=False)  # the scales come back too
    assert served.greedy(PROMPTS) == tokens
    assert kv_scale_state(served.model) == scales


@pytest.fixture
def no_connector_afterwards() -> Iterator[None]:
    """vLLM keeps one connector a process, which later engines would take for theirs."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    yield
    ensure_kv_transfer_shutdown()


@pytest.mark.usefixtures("no_connector_afterwards")
def test_a_kv_connector_forgets_old_keys(
    shared_engine: Callable[[str], Engine],
    other_engine: Callable[..., Engine],
    checkpoints: dict[str, Path],
    weights: dict,
    tmp_path: Path,
) -> None:
    """Fails where the prefix cache is reset without its connector's."""
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    plain = shared_engine("plain cache")
    plain.model.load_weights(load_tensors(checkpoints["b"]).items())
    plain.llm.reset_prefix_cache()
    expected = plain.greedy([LONG])
    transfer = KVTransferConfig(
        kv_connector="ForgetfulConnector",
        kv_connector_module_path="support.forgetful_connector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(tmp_path)},
    )
    keeping = other_engine(checkpoints["a"], recipe, kv_transfer_config=transfer)
    keeping.greedy([LONG])
    assert any(tmp_path.iterdir()), "the connector has kept nothing"
    b = {name: tensor for name, tensor in weights["b"].items() if name not in SCALES}
    keeping.model.load_weights(b.items())
    keeping.llm.reset_prefix_cache()
    assert keeping.greedy([LONG]) != expected, "the naive way would have sufficed"
    refit(keeping.llm, b.items(), expect_kv_scales=False)
    assert keeping.greedy([LONG]) == expected
    guard = state_of(keeping.model).guard
    guard.outdate_cache("a test's keys")
    keeping.llm.reset_prefix_cache()
    with pytest.raises(RefitError, match=r"a test's keys.*reset_connector=True"):
        require_ready(keeping.llm)
    keeping.llm.reset_prefix_cache(reset_connector=True)
    require_ready(keeping.llm)


@pytest.mark.parametrize("name", ["ExampleConnector", "LMCacheConnectorV1", "NixlConnector"])
def test_connectors_that_cannot_forget_are_refused(name: str) -> None:
    alone = KVTransferConfig(kv_connector=name, kv_role="kv_both")
    nested = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                {"kv_connector": name, "kv_role": "kv_both"},
            ]
        },
    )
    for config in (alone, nested):
        with pytest.raises(UnsupportedError, match=rf"'{name}' has no reset_cache.*Offloading"):
            check_connector(config)


def test_connectors_that_forget_are_served() -> None:
    check_connector(None)
    check_connector(KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both"))

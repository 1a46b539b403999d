"""Engines that start anew in BF16 inside their workers: real vLLM on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import answer, engines_imported, run_forked

pytest.importorskip("vllm")
import vllm_fp8rl
from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from nemo_rl_ext.workers.rollout_engine import (
    OWN_BYTES,
    UPSTREAM_EXTENSION,
    RestartableEngine,
    within_free_memory,
)
from nemo_rl_ext.workers.self_calibration import CalibratingLLM
from support.engine import SETTINGS, Engine, make_checkpoint, start_engine
from support.nemo_rl import Closing

SCRIPT = Path(__file__).with_name("rollout_engine_cases.py")
PROMPTS = [[(31 * i + 7 * j * j) % 500 + 5 for j in range(20 + 9 * i)] for i in range(3)]
LONG, SHORT = [7, 8, 9], [5, 6, 7, 8]
LENGTH = 60
RECIPE = Recipe()
UNQUANTIZED_CACHE = Recipe.from_dict({"kv_cache": {"dtype": "auto"}})


class Upstream:
    """What the mixin needs of NeMo RL's synchronous vLLM worker."""

    cfg: Any = {"vllm_cfg": {"async_engine": False}}
    llm: Any = None

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**llm_kwargs)


class Asked:
    """Stands for NeMo RL's worker: what its engine was asked for."""

    given: Any = None
    llm: Any = None

    def __init__(self, executor: str | None) -> None:
        self.cfg = {
            "vllm_cfg": {"async_engine": True},
            "vllm_kwargs": {"distributed_executor_backend": executor},
        }

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        self.given = llm_kwargs


class Recorded(RestartableEngine, Asked):
    pass


class Worker(RestartableEngine, Upstream):
    worker_extension = f"{Closing.__module__}.{Closing.__name__}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "a", 0)
    return folder


@pytest.fixture(scope="module", autouse=True)
def asynchronous(folder: Path) -> Iterator[Future[dict[str, Any]]]:
    """What the script finds, which runs beside the tests of a synchronous engine."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(lambda: answer(run_forked(SCRIPT, folder, timeout=240)))


@pytest.fixture(scope="module")
def truth(folder: Path) -> dict[str, Any]:
    """What vLLM says without fp8rl, and with its FP8 linears."""
    said: dict[str, Any] = {}
    kinds: dict[str, dict[str, Any]] = {"bf16": {"quantization": None}, "fp8": {}}
    for name, changes in kinds.items():
        engine = start_engine(folder / "a", UNQUANTIZED_CACHE, **changes)
        said[f"{name}_long"] = engine.greedy([LONG], LENGTH)[0]
        said[f"{name}_short"] = engine.greedy([SHORT])[0]
        said[name] = engine.greedy(PROMPTS)
        engine.llm.llm_engine.engine_core.shutdown()
    return said


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Any]:
    made = Worker()
    arguments = {
        "model": str(folder / "a"),
        **SETTINGS,
        **vllm_fp8rl.engine_args(RECIPE),
        "worker_extension_cls": UPSTREAM_EXTENSION,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a restart changes it
        # The core of the engine that is made again: vLLM would spawn it, to import all anew.
        patch.setattr("vllm.v1.engine.utils.get_mp_context", engines_imported)
        made._create_engine(arguments)
        first = made.llm
        yield made
    made.llm.llm_engine.engine_core.shutdown()
    # It sleeps in this process; if it ended when it is collected, so would later engines' ranks.
    first.llm_engine.engine_core.shutdown()
    del made._retired, first
    gc.collect()


def test_a_synchronous_engine(worker: Any, truth: dict[str, Any]) -> None:
    first = worker.llm
    assert isinstance(first, CalibratingLLM)
    assert worker.hold_if_idle()

    seconds = worker.restart_in_bf16()
    assert seconds is not None and seconds > 0
    assert Closing.closed == 1
    assert not isinstance(worker.llm, CalibratingLLM)
    config = worker.llm.llm_engine.vllm_config
    assert config.model_config.quantization == "fp8rl"
    assert config.cache_config.cache_dtype in ("auto", "float32")
    assert not hasattr(worker.llm.llm_engine, "model_executor"), "still in this process"
    assert Engine(worker.llm, RECIPE).greedy(PROMPTS) == truth["bf16"]


def test_an_asynchronous_engine(
    asynchronous: Future[dict[str, Any]], truth: dict[str, Any]
) -> None:
    found = asynchronous.result()
    assert found["short"] == truth["fp8_short"]
    assert found["held"] == [False, True]
    assert found["error"] == "1 requests are still running in this engine."
    assert found["long"] == truth["fp8_long"]
    assert found["waits"] == [0, False]
    assert found["seconds"] > 0
    assert found["same"] is True
    assert found["waited"] == truth["bf16_short"]
    assert found["after"] == truth["bf16_long"]
    assert truth["bf16_long"] != truth["fp8_long"], "the checkpoint cannot tell FP8 from BF16"
    assert found["dtype"] in ("auto", "float32")


def test_a_rank_that_owns_no_engine_is_left_alone() -> None:
    other = Worker()
    assert other.hold_if_idle()
    assert other.restart_in_bf16() is None
    other.release()


def test_an_extension_of_another_transport_is_not_replaced() -> None:
    """Naively its own methods would be missing when the first refit begins."""
    other = Worker()
    given = f"{UPSTREAM_EXTENSION}WithCheckpointEngine"
    with pytest.raises(
        UnsupportedError, match=rf"'{given}'.*'policy\.generation\.refit_transport'"
    ):
        other._create_engine({"worker_extension_cls": given})
    assert other.llm is None


@pytest.mark.parametrize(
    ("given", "asked", "taken"),
    [
        (None, None, None),
        (None, "mp", "mp"),
        (None, "uni", "uni"),
        ("ray", None, "ray"),
        ("ray", "ray", "ray"),
    ],
)
def test_the_configs_executor_is_taken_where_upstream_has_none(
    given: str | None, asked: str | None, taken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Upstream writes its own choice over the user's, None for an engine of one GPU."""
    other = Recorded(asked)
    other._create_engine({"distributed_executor_backend": given})
    assert other.given["distributed_executor_backend"] == taken
    assert not caplog.messages


@pytest.mark.parametrize(
    ("given", "asked"), [("ray", "mp"), ("uni", "mp"), (None, "ray"), (None, "external_launcher")]
)
def test_an_executor_that_the_engine_cannot_have_is_told(
    given: str | None, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By "ray" vLLM would wait for a second GPU, inside the actor that has the only one."""
    other = Recorded(asked)
    other._create_engine({"distributed_executor_backend": given})
    assert other.given["distributed_executor_backend"] == given
    (message,) = caplog.messages
    assert f"vllm_kwargs.distributed_executor_backend' is '{asked}'" in message
    assert message.endswith(f"run with '{given or 'uni'}'.")


def test_an_engine_asks_for_no_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (OWN_BYTES + 767, 1000))
    assert within_free_memory({"gpu_memory_utilization": 0.9}) == {"gpu_memory_utilization": 0.76}
    for enough in ({"gpu_memory_utilization": 0.6}, {"gpu_memory_utilization": 0.76}, {}):
        assert within_free_memory(enough) == enough

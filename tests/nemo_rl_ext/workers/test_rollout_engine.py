"""What `RolloutEngine` asks of vLLM in the place of upstream; engines: test_in_flight.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.workers.rollout_engine import UPSTREAM_EXTENSION, RolloutEngine
from nemo_rl_ext.workers.self_calibration import CalibratingLLM


class Asked:
    """Stands for NeMo RL's worker: what its engine was asked for."""

    given: Any = None
    llm: Any = None

    def __init__(
        self, executor: str | None = None, *, asynchronous: bool = True, cache: str = "auto"
    ) -> None:
        self.cfg = {
            "vllm_cfg": {"async_engine": asynchronous},
            "vllm_kwargs": {"distributed_executor_backend": executor},
        }
        self.cache = cache

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        self.given = llm_kwargs
        config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=self.cache))
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


class Recorded(RolloutEngine, Asked):
    pass


@pytest.mark.parametrize(
    ("asynchronous", "cache", "calibrates"),
    [(False, "fp8_e4m3", True), (False, "auto", False), (True, "fp8_e4m3", False)],
)
def test_a_synchronous_engine_with_an_fp8_cache_calibrates_itself(
    asynchronous: bool, cache: str, calibrates: bool
) -> None:
    worker = Recorded(asynchronous=asynchronous, cache=cache)
    worker._create_engine({"seed": 3})
    assert isinstance(worker.llm, CalibratingLLM) is calibrates
    assert worker.given["seed"] == 3
    assert worker.given["worker_extension_cls"] == RolloutEngine.worker_extension


def test_an_extension_of_another_transport_is_not_replaced() -> None:
    """Naively its own methods would be missing when the first refit begins."""
    other = Recorded()
    given = f"{UPSTREAM_EXTENSION}WithCheckpointEngine"
    with pytest.raises(
        UnsupportedError, match=rf"'{given}'.*'policy\.generation\.refit_transport'"
    ):
        other._create_engine({"worker_extension_cls": given})
    assert other.llm is None


@pytest.mark.parametrize(
    ("given", "asked", "taken", "told"),
    [
        (None, None, None, False),
        (None, "mp", "mp", False),
        ("ray", "ray", "ray", False),
        ("uni", "mp", "uni", True),
        # By "ray" vLLM would wait for a second GPU, inside the actor that has the only one.
        (None, "ray", None, True),
    ],
)
def test_the_configs_executor_is_taken_where_the_engine_can_have_it(
    given: str | None, asked: str | None, taken: str | None, told: bool, caplog: Any
) -> None:
    """Upstream writes its own choice over the user's, None for an engine of one GPU."""
    other = Recorded(asked)
    other._create_engine({"distributed_executor_backend": given})
    assert other.given["distributed_executor_backend"] == taken
    assert [message.endswith(f"run with '{given or 'uni'}'.") for message in caplog.messages] == (
        [True] * told
    )

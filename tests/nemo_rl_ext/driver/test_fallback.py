"""The order in which BF16 engines take the place of FP8 ones, seen from the process that refits.

Policy, generation and workers are stand-ins that note what is called, without Ray; real ones run in
``tests/contract/test_drivers.py``, real engines in ``test_rollout_engine.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fp8rl import Recipe
from fp8rl.errors import UnsupportedError
from fp8rl.recipe import KVDtype
from nemo_rl_ext.config.merge import withdraw_kv_cache
from nemo_rl_ext.driver import fallback
from nemo_rl_ext.names import LOGGER
from nemo_rl_ext.workers.training import kv_scales_withdrawn


def generation_section(*, shared: bool, dtype: KVDtype = "fp8_e4m3") -> dict[str, Any]:
    block = Recipe.from_dict({"kv_cache": {"dtype": dtype}}).to_dict()
    announced = "fp8" if dtype == "fp8_e4m3" else "auto"
    return {
        "vllm_cfg": {"fp8rl": block, "kv_cache_dtype": announced},
        "colocated": {"enabled": shared},
    }


class Stage:
    """Stand-ins of one run, and the names of what was called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shared: bool, busy: int = 0) -> None:
        self.called: list[str] = []
        self.busy = busy
        self.started: list[float | None] = [2.0, None]
        self.fails = False
        self.generation = SimpleNamespace(
            cfg=generation_section(shared=shared),
            worker_group=SimpleNamespace(workers=["owner", "rank 1"], cluster=None),
            dp_size=1,
            _post_init=self.noting("_post_init"),
            finish_generation=self.noting("finish_generation"),
        )
        self.trainer = SimpleNamespace(cfg={"generation": generation_section(shared=shared)})
        self.policy = SimpleNamespace(
            worker_group=SimpleNamespace(workers=[self.trainer], cluster=None),
            offload_after_refit=self.noting("offload_after_refit"),
            prepare_for_lp_inference=self.noting("prepare_for_lp_inference"),
        )
        self.synchronizer = SimpleNamespace(init_communicator=self.noting("init_communicator"))
        monkeypatch.setattr(fallback, "_call", self.call)
        monkeypatch.setattr(fallback, "POLL_S", 0.0)

    def noting(self, name: str) -> Callable[[], bool]:
        def note() -> bool:
            self.called.append(name)
            return True

        return note

    def call(self, workers: list[Any], method: str) -> list[Any]:
        """As through Ray: a method of each worker; only the first of vLLM's owns an engine."""
        self.called.append(method)
        if method == "withdraw_kv_cache":
            return [withdraw_kv_cache(worker.cfg) for worker in workers]
        if method == "hold_if_idle":
            self.busy -= 1
            return [worker != "owner" or self.busy < 0 for worker in workers]
        if method == "restart_in_bf16":
            if self.fails:
                raise ValueError("Free memory on device is less than desired")
            return self.started
        return [None for _ in workers]

    def fall_back(self) -> None:
        fallback.fall_back(self.policy, self.generation, self.synchronizer)


def test_engines_on_the_trainers_gpus_have_them_alone_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, LOGGER)
    stage = Stage(monkeypatch, shared=True)
    stage.fall_back()
    assert stage.called == [
        "offload_after_refit",
        "hold_if_idle",
        "restart_in_bf16",
        "_post_init",
        "withdraw_kv_cache",
        "finish_generation",
        "prepare_for_lp_inference",
        "init_communicator",
    ]
    assert "rollouts are in BF16: 1 engines started in 2 s" in caplog.text
    for section in (stage.generation.cfg, stage.trainer.cfg["generation"]):
        assert section["vllm_cfg"]["kv_cache_dtype"] == "auto"
        assert section["vllm_cfg"]["fp8rl"] == generation_section(shared=True)["vllm_cfg"]["fp8rl"]
    assert kv_scales_withdrawn(stage.trainer.cfg)


def test_engines_on_gpus_of_their_own_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=False, busy=3)
    stage.fall_back()
    assert stage.called == [
        *["hold_if_idle"] * 4,
        "restart_in_bf16",
        "_post_init",
        "withdraw_kv_cache",
        "init_communicator",
    ]


@pytest.mark.parametrize("in_training", [True, False])
def test_a_trainer_that_rounds_to_an_int8_cache_is_told(
    monkeypatch: pytest.MonkeyPatch, in_training: bool
) -> None:
    stage = Stage(monkeypatch, shared=False)
    stage.generation.cfg = generation_section(shared=False, dtype="int8_per_token_head")
    stage.generation.cfg["vllm_cfg"]["fp8rl"]["kv_cache"]["in_training"] = in_training
    stage.fall_back()
    assert ("withdraw_kv_cache" in stage.called) is in_training


def test_an_engine_that_does_not_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=True)
    stage.fails = True
    with pytest.raises(UnsupportedError, match=r"could not start .*Free memory.*rollout=false"):
        stage.fall_back()
    assert "withdraw_kv_cache" not in stage.called
    stage.fails, stage.started = False, [None, None]  # none may stay in FP8
    with pytest.raises(UnsupportedError, match="0 of 1 engines are fp8rl's"):
        stage.fall_back()


def test_requests_go_on_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=False)
    fallback.release(stage.generation)
    assert stage.called == ["release"]

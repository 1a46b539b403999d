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
from nemo_rl_ext import fallback, rollout_engine
from nemo_rl_ext.config_keys import rollouts_in_bf16
from nemo_rl_ext.guard import LOGGER


def generation_section(*, shared: bool) -> dict[str, Any]:
    block = Recipe.from_dict({"kv_cache": {"dtype": "fp8_e4m3"}}).to_dict()
    return {
        "vllm_cfg": {"fp8rl": block, "kv_cache_dtype": "fp8"},
        "vllm_kwargs": {
            "quantization": "fp8rl",
            "kv_cache_dtype": "fp8_e4m3",
            "additional_config": {"fp8rl": block},
        },
        "colocated": {"enabled": shared},
    }


class Stage:
    """Stand-ins of one run, and the names of what was called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, shared: bool, busy: int = 0) -> None:
        self.called: list[str] = []
        self.busy = busy
        self.fails = False
        self.generation = SimpleNamespace(
            cfg=generation_section(shared=shared),
            worker_group=SimpleNamespace(workers=["owner", "rank 1"], cluster=None),
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
        monkeypatch.setattr(fallback, "_on", self.on)
        monkeypatch.setattr(fallback, "POLL_S", 0.0)

    def noting(self, name: str) -> Callable[[], None]:
        return lambda: self.called.append(name)

    def on(self, workers: list[Any], function: Callable[[Any], Any]) -> list[Any]:
        """As through Ray: a function in each worker; only the first of vLLM's owns an engine."""
        self.called.append(function.__name__)
        if function is fallback.announce_to_trainer:
            return [function(worker) for worker in workers]
        if function is rollout_engine.running:
            self.busy -= 1
            return [max(self.busy + 1, 0), 0]
        if function is rollout_engine.restart_in_bf16:
            if self.fails:
                raise ValueError("Free memory on device is less than desired")
            return [2.0, None]
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
        "hold",
        "running",
        "restart_in_bf16",
        "_post_init",
        "announce_to_trainer",
        "finish_generation",
        "prepare_for_lp_inference",
        "init_communicator",
    ]
    assert "rollouts are in BF16: 1 engines started in 2 s" in caplog.text


def test_engines_on_gpus_of_their_own_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=False, busy=3)
    stage.fall_back()
    assert stage.called == [
        "hold",
        *["running"] * 4,
        "restart_in_bf16",
        "_post_init",
        "announce_to_trainer",
        "init_communicator",
    ]


def test_both_sides_know_of_a_cache_without_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=True)
    before = generation_section(shared=True)
    stage.fall_back()
    for section in (stage.generation.cfg, stage.trainer.cfg["generation"]):
        assert section["vllm_cfg"]["kv_cache_dtype"] == "auto"
        assert section["vllm_cfg"]["fp8rl"]["rollout"] is False
        assert section["vllm_kwargs"] == rollouts_in_bf16(before["vllm_kwargs"])


def test_an_engine_that_does_not_start_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, shared=True)
    stage.fails = True
    with pytest.raises(UnsupportedError, match=r"could not start .*Free memory.*rollout=false"):
        stage.fall_back()
    assert "announce_to_trainer" not in stage.called

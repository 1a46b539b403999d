"""Scales of the trainer in refits that bring none, on a class shaped like upstream's ``Policy``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fp8rl.errors import ModelError
from nemo_rl_ext.driver.run_state import RunState
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches import kv_scales
from support.nemo_rl import planned
from support.tiny import make_checkpoint

FOUND = {"layers": {"a": 0.5}, "outgrown": ["a"]}


class Policy:
    data_parallel_size = 2

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.cfg = cfg
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def calibrate_qkv_fp8_scales(
        self, data: Any, micro_batch_size: int | None = None, include_q: bool = False
    ) -> dict[str, Any]:
        self.calls.append((data, {"mbs": micro_batch_size, "q": include_q}))
        return FOUND

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, *, num_buffers: int | None = None
    ) -> Any:
        return kv_scales, num_buffers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "a", 0)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, RunState]]:
    batches = ModuleType("nemo_rl.distributed.batched_data_dict")
    batches.BatchedDataDict = dict  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, batches.__name__, batches)
    module: Any = ModuleType("nemo_rl.models.policy.lm_policy")
    module.Policy = type("Policy", (Policy,), dict(vars(Policy)))
    finder = PatchFinder()
    finder.run.correction = SimpleNamespace(outgrown=None)  # type: ignore[assignment]
    kv_scales.apply(module, finder)
    yield module.Policy, finder.run


def config(model: Path, **vllm: Any) -> dict[str, Any]:
    block = {"kv_cache": {"recalibrate": "grow"}}
    asked = {"fp8rl": block, "async_engine": True} | vllm
    return planned(
        {
            "model_name": str(model),
            "make_sequence_length_divisible_by": 8,
            "max_total_sequence_length": 100,
            "megatron_cfg": {"enabled": True, "fp8rl": asked["fp8rl"]},
            "generation": {"vllm_cfg": asked},
        },
        "single_controller",
    )


def test_asynchronous_engines_get_scales_with_every_refit(patched: Any, model: Path) -> None:
    policy_class, run = patched
    policy = policy_class(config(model))
    assert policy.broadcast_weights_for_collective(num_buffers=3) == ({"a": 0.5}, 3)
    ((batch, options),) = policy.calls
    assert options == {"mbs": 1, "q": True}
    assert batch["input_ids"].shape == (2 * kv_scales.SEQUENCES, 96)
    assert 0 <= int(batch["input_ids"].min()) < 64 < int(batch["input_ids"].max()) < 512
    assert batch["input_lengths"].tolist() == [96] * 8
    assert run.correction is not None and run.correction.outgrown == 1


def test_scales_that_were_given_stay_and_others_are_as_before(patched: Any, model: Path) -> None:
    policy = patched[0](config(model))
    assert policy.broadcast_weights_for_collective({"b": 1.0})[0] == {"b": 1.0}
    assert policy.broadcast_weights_for_collective(kv_scales={"b": 1.0})[0] == {"b": 1.0}
    assert policy.calls == []
    for vllm in (
        {"async_engine": False},
        {"fp8rl": {"kv_cache": {"dtype": "auto"}}},
        {"fp8rl": None},
    ):
        policy = patched[0](config(model, **vllm))
        assert policy.broadcast_weights_for_collective() == (None, None)
        assert policy.calls == []


def test_a_model_that_cannot_be_read_is_told(patched: Any, tmp_path: Path) -> None:
    policy = patched[0](config(tmp_path))
    with pytest.raises(ModelError, match=r"vocab_size.*kv_cache\.dtype' to auto"):
        policy.broadcast_weights_for_collective()

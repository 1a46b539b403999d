"""Refits of an asynchronous worker with requests in flight, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.processes import run_script
from vllm_fp8rl.testing.tiny import make_checkpoint

SCRIPT = Path(__file__).with_name("in_flight_cases.py")
LENGTH = 120


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, seed)
    return run_script(SCRIPT, root, timeout=240)


def test_requests_go_on_where_no_scale_has_changed(found: dict[str, Any]) -> None:
    assert found["same"] == [True, found["a"]]


def test_where_a_scale_grows_requests_compute_their_keys_again(found: dict[str, Any]) -> None:
    old_tokens, rest_is_of_the_new_weights = found["split"]
    assert found["grown"] is True
    assert 5 <= old_tokens < LENGTH
    assert rest_is_of_the_new_weights is True


def test_an_engine_that_was_paused_stays_paused(found: dict[str, Any]) -> None:
    assert (found["by_ipc"], found["still_paused"]) == (True, True)
    assert found["a_again"] == found["a"]


def test_upstreams_method_alone_ends_the_engine_before_it_mixes_scales(
    found: dict[str, Any],
) -> None:
    assert found["naive"] == "EngineDeadError"

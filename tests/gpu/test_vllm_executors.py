"""Refits of engines whose workers are other processes: GPU tensors travel by CUDA IPC handle."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from support.processes import run_script

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

SCRIPT = Path(__file__).with_name("executor_cases.py")


def run(mode: str, folder: Path) -> dict[str, Any]:
    # Ray would else join a cluster that happens to run on this host, and wait for its GPUs.
    return run_script(SCRIPT, mode, folder, timeout=400, variables={"RAY_ADDRESS": "local"})


@pytest.mark.parametrize("mode", ["core", "mp", "ray"])
def test_weights_travel_by_handle(mode: str, tmp_path: Path) -> None:
    if mode != "core" and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs")
    if mode == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    found = run(mode, tmp_path)
    assert found["ranks"] == (1 if mode == "core" else 2)
    assert found["own_process"] is True
    # Ray's workers too see all GPUs that vLLM has on a host.
    assert found["near"] == [True, False]
    assert found["a"] != found["b"]
    assert found["near_a"] == found["one_buffer"] == found["a"]
    assert found["near_b"] == found["after_nan"] == found["b"]
    assert found["kept_bytes"] <= 0
    assert found["reloaded_a"] == found["updated_a"] == found["a"]
    assert found["reloaded_b"] == found["b"]
    nan, refused = found["nan"]
    assert nan.startswith("RefitError: 'model.norm.weight' has NaN")
    assert refused.startswith("RefitError: The weights are half-updated")


def test_async_engine(tmp_path: Path) -> None:
    found = run("async", tmp_path)
    assert found["near_a"] == found["a"] != found["b"]
    assert found["near_b"] == found["b"]
    assert found["kept"] == 400

"""Sleep mode with both of vLLM's model runners; the first resets KV scales when it wakes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.processes import environment

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
pytest.importorskip("vllm")

CASES = Path(__file__).parent / "sleep_cases.py"


SECOND = "vllm.v1.worker.gpu.model_runner"


@pytest.mark.parametrize(
    ("version", "runner", "options"),
    [("0", "vllm.v1.worker.gpu_model_runner", []), ("1", SECOND, []), ("1", SECOND, ["exact"])],
    ids=["first", "second", "exact"],
)
def test_weights_and_scales_after_every_kind_of_sleep(
    version: str, runner: str, options: list[str]
) -> None:
    if options and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    done = subprocess.run(
        [sys.executable, str(CASES), *options],
        env=environment(VLLM_USE_V2_MODEL_RUNNER=version),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert f"runner: {runner}" in done.stdout
    assert "passed memory_does_not_grow" in done.stdout

"""A sleeping synchronous engine makes room for one in BF16, in a process of its own."""

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

CASES = Path(__file__).parent / "rollout_engine_cases.py"


def test_bf16_takes_the_place_of_a_sleeping_fp8_engine() -> None:
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    (passed,) = (line for line in done.stdout.splitlines() if line.startswith("passed: "))
    print(passed)  # noqa: T201 - seconds and memory, with -rP

"""Expert parallel over two ranks (gloo), in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import run_script
from vllm_fp8rl.testing.tiny import make_moe_checkpoint

SCRIPT = Path(__file__).with_name("tp_moe.py")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("experts_on_a_cpu")
def test_two_ranks(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        make_moe_checkpoint(tmp_path / name, 40 + seed, moe_intermediate_size=192)
    found = run_script(SCRIPT, tmp_path, timeout=540)
    assert found["codes"] is True
    assert found["there_and_back"] is True
    assert found["recovered"] is True
    assert found["pointers"] is True
    lacks, refused = found["errors"]
    assert lacks.startswith("RefitError: The refit lacks 1 of the model's tensors: 'model.layers.1")
    assert refused.startswith("RefitError: The weights are half-updated")

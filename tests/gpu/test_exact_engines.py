"""``exact`` with both engines on a GPU: batches, chunks, cached prompts, preemption and a refit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytest.importorskip("vllm")

from support.processes import environment
from support.tiny import make_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "exact.py"
WHOLE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
HALF_GROUPS = WHOLE | {"hidden_size": 576, "intermediate_size": 1472}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "shape", "options"),
    [
        ("fp8_e4m3", WHOLE, []),
        ("int8_per_token_head", HALF_GROUPS, ["--eager"]),
        ("auto", HALF_GROUPS, ["--eager"]),
    ],
)
def test_logprobs_are_the_rollouts(
    dtype: str, shape: dict[str, Any], options: list[str], tmp_path: Path
) -> None:
    """A cache too small for 256 requests preempts some."""
    folder, out = make_checkpoint(tmp_path / "model", 0, **shape, **HEADS), tmp_path / "out.json"
    given = ["--kv", dtype, "--random-prompts", "--refits", "1", "--cache", "0.01"]
    done = subprocess.run(
        [sys.executable, SCRIPT, folder, *given, "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=580,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    runs = json.loads(out.read_text(encoding="utf-8"))["runs"]
    assert {row["equal"] for row in runs.values()} == {1.0} and len(runs) == 7
    assert sum(row["preempted"] for row in runs.values())

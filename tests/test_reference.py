"""docs/reference.md is what the code gives."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("plugins", "vllm_fp8rl", "megatron_fp8rl", "torch_fp8rl", "nemo_rl_ext"),
    *("fp8rl_bench", "fp8rl_demo"),
)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_up_to_date(tool):
    assert tool.FILE.read_text(encoding="utf-8") == tool.reference(), "run tools/reference.py"


def test_every_metric_has_a_meaning(tool):
    known = {*tool.MismatchMetrics.__dataclass_fields__, *tool.CORRECTION, *tool.LOSS}
    assert tool.emitted_metrics() == known
    driver = (ROOT / "nemo_rl_ext" / "driver" / "batch_correction.py").read_text(encoding="utf-8")
    for name in tool.DRIVER:
        assert f'"{name}"' in driver
    replay = (ROOT / "megatron_fp8rl" / "router_replay.py").read_text(encoding="utf-8")
    assert set(re.findall(r'"(\w+_share)":', replay)) == set(tool.REPLAY)
    kv_cache = (ROOT / "plugins" / "fp8rl" / "training" / "kv.py").read_text(encoding="utf-8")
    for name in tool.KV_CACHE:
        assert f'"{name}"' in kv_cache


def test_every_environment_variable_has_a_meaning(tool):
    files = [f for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    read = {
        name
        for file in [*files, ROOT / "tools" / "install.py"]
        for name in re.findall(r'"(FP8RL_[A-Z_]+)"', file.read_text(encoding="utf-8"))
        if not name.startswith("FP8RL_TEST_")
    }
    assert read == set(tool.ENVIRONMENT)

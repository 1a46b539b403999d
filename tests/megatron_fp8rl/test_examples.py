"""The examples of the doors, run as a user runs them.

Megatron-LM's and Megatron-Bridge's sources come from MEGATRON_LM_SRC and MEGATRON_BRIDGE_SRC; what
they import besides must be installed or on PYTHONPATH. An installed Bridge needs no variable.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp8rl import PinPolicy
from fp8rl.models.spec import ModelSpec
from fp8rl.numerics import quantize_block
from fp8rl.recipe import Pins
from support.numeric import same_codes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOSS = re.compile(r"^step \d+ loss ([\d.]+)$", re.M)
MISSING = re.compile(
    r"(?:ModuleNotFoundError|ImportError): (.*)$|cannot be imported \((.*)\)", re.M
)


def run(script: str, *arguments: str | Path, recipe: dict) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "FP8RL_RECIPE": json.dumps(recipe)}
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / script), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    missing = MISSING.search(done.stderr)
    if done.returncode and missing:
        pytest.skip(f"{script} needs more than its source: {missing.group(1) or missing.group(2)}")
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses_fall(printed: str) -> bool:
    losses = [float(loss) for loss in LOSS.findall(printed)]
    return losses[-1] < losses[0]


def source(name: str, installed: str = "") -> None:
    """Skip where neither a checkout is named nor a module of this name is installed."""
    if not os.environ.get(name) and not (installed and find_spec(installed)):
        pytest.skip(f"{name} does not name a checkout")


def check_export(out: Path, policy: PinPolicy) -> None:
    """FP8 tensors are the codes of the BF16 ones, for exactly the modules that run in FP8."""
    bf16, fp8 = load_file(out / "bf16.safetensors"), load_file(out / "fp8.safetensors")
    expected = {f"{row.name}.weight" for row in policy.report() if row.precision == "fp8"}
    assert {n for n, t in fp8.items() if t.dtype == torch.float8_e4m3fn} == expected
    assert set(fp8) == set(bf16) | {f"{name}_scale_inv" for name in expected}
    for name, tensor in bf16.items():
        if name not in expected:
            assert torch.equal(fp8[name], tensor)
            continue
        codes, scale_inv = quantize_block(tensor)
        assert same_codes((fp8[name], fp8[f"{name}_scale_inv"]), (codes, scale_inv)), name


@pytest.mark.slow
def test_standalone(tmp_path):
    pins = {"layers": [-1], "kinds": ["o_proj"]}
    printed = run("megatron_standalone.py", tmp_path, recipe={"pins": pins})
    assert "layers 2: BF16 qkv_proj (layers: -1)" in printed
    assert losses_fall(printed)
    check_export(tmp_path, PinPolicy(Pins(**pins), ModelSpec.dense(3).names))
    checkpoint = torch.load(tmp_path / "model.pt")
    assert not any("fp8" in name for name in checkpoint)


def test_megatron_lm(tmp_path):
    source("MEGATRON_LM_SRC")
    pins = {"layers": [0], "kinds": ["o_proj"]}
    arguments = ["--save", tmp_path, "--save-interval", "4"]
    printed = run("megatron_lm.py", *arguments, recipe={"pins": pins})
    assert "6 modules in FP8" in printed and losses_fall(printed)


def test_megatron_bridge(tmp_path):
    source("MEGATRON_BRIDGE_SRC", installed="megatron.bridge")
    pins = {"layers": [0], "kinds": ["o_proj"]}
    assert losses_fall(run("megatron_bridge.py", tmp_path, recipe={"pins": pins}))
    check_export(tmp_path, PinPolicy(Pins(**pins), ModelSpec.dense(3).names))

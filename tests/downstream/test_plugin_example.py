"""The README's example plugin, installed as a user would and seen from fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fp8rl_plugin_example"

USE = """
import torch
from fp8rl import PluginManager, Recipe
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext import correct, resolve_corrector

recipe = Recipe.from_dict({"importance_sampling": {"corrector": "sqrt"}, "pins": {"last": 1}})
plugins = PluginManager()
policy = plugins.pin_policy(recipe.pins, ModelSpec.dense(3).names)
assert [n for n in policy.bf16_linears() if ".2." not in n] == ["model.layers.0.mlp.down_proj"]

config = recipe.importance_sampling
rollout, trainer = -torch.rand(2, 5), -torch.rand(2, 5)
mask = torch.ones(2, 5)
found = resolve_corrector(config.corrector, plugins)(rollout, trainer, mask, config)
expected = (trainer.double() - rollout.double()).exp().clamp(max=config.high).sqrt()
torch.testing.assert_close(found.weights.double(), expected, rtol=1e-6, atol=0)
assert not torch.equal(found.weights, correct(rollout, trainer, mask, config).weights)

for step in (1, 2):
    plugins.hook.step_finished(step=step, metrics={"loss": step / 4})
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the example installed by pip, to be put on PYTHONPATH."""
    pytest.importorskip("setuptools", reason="setuptools, which builds the example, is missing")
    target = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source")
    for file in EXAMPLE.glob("*.*"):  # pip would leave a build folder in the repository
        (source / file.name).write_bytes(file.read_bytes())
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, target, source], check=True, timeout=120
    )
    return target


@pytest.fixture
def run(installed, tmp_path):
    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "160", **env},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_plugins_lists_it(run):
    result = run("-m", "fp8rl", "plugins")
    assert result.returncode == 0, result.stderr
    row = next(line for line in result.stdout.splitlines() if "fp8rl-plugin-example" in line)
    for part in ("example", "1.0.0", "register_is_correctors, register_pins, step_finished"):
        assert part in row


def test_pin_corrector_and_observer_take_effect(run, tmp_path):
    result = run("-c", USE, EXAMPLE_STEPS_FILE=str(tmp_path / "log.jsonl"))
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.25},
        {"step": 2, "loss": 0.5},
    ]


def test_recipe_with_its_corrector_is_valid_only_with_it(run):
    text = '{"importance_sampling": {"corrector": "sqrt"}}'
    result = run("-m", "fp8rl", "recipe", text)
    assert result.returncode == 0, result.stderr
    assert "corrector: sqrt" in result.stdout
    result = run("-m", "fp8rl", "recipe", text, FP8RL_BLOCK_PLUGINS="example")
    assert result.returncode == 2
    assert "corrector 'sqrt' is not known; use one of is" in result.stderr

"""The README's example plugin, installed as a user would and seen from a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "fp8rl_plugin_example"
USE = """
import json
import os

import torch
from typer.testing import CliRunner

from fp8rl import PluginManager, Recipe
from fp8rl.cli import build_app
from fp8rl.models.spec import ModelSpec
from nemo_rl_ext import resolve_corrector

block = {"importance_sampling": {"corrector": "sqrt"}}
recipe = Recipe.from_dict({**block, "pins": {"last": 1}})
plugins = PluginManager()
pinned = plugins.pin_policy(recipe.pins, ModelSpec.dense(3).names).bf16_linears()
given = torch.tensor([[-2.0, -1.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2)
correct = resolve_corrector("sqrt", plugins)
weights = correct(*given, recipe.importance_sampling).weights.tolist()
for step in (1, 2):
    plugins.hook.step_finished(step=step, metrics={"loss": step / 4})


def command(*arguments):
    done = CliRunner().invoke(build_app(PluginManager()), arguments)
    return done.exit_code, done.output, str(done.exception)


listed, valid = command("plugins"), command("recipe", json.dumps(block))
os.environ["FP8RL_BLOCK_PLUGINS"] = "example"
print(json.dumps([pinned, weights, listed, valid, command("recipe", json.dumps(block))]))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What a process finds that has the example on its path, installed by pip; its log of steps."""
    pytest.importorskip("setuptools", reason="setuptools, which builds the example, is missing")
    target, source = (tmp_path_factory.mktemp(name) for name in ("installed", "source"))
    for file in EXAMPLE.glob("*.*"):  # pip would leave a build folder in the repository
        (source / file.name).write_bytes(file.read_bytes())
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, target, source], check=True, timeout=120
    )
    path = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])
    steps = {"EXAMPLE_STEPS_FILE": str(target / "log.jsonl"), "COLUMNS": "160"}
    env = {**os.environ, "PYTHONPATH": path, **steps}
    done = subprocess.run(
        [sys.executable, "-c", USE], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), target / "log.jsonl"


def test_plugins_lists_it(found: Any) -> None:
    code, output, _ = found[0][2]
    assert code == 0, output
    row = next(line for line in output.splitlines() if "fp8rl-plugin-example" in line)
    for part in ("example", "1.0.0", "register_is_correctors, register_pins, step_finished"):
        assert part in row


def test_pin_corrector_and_observer_take_effect(found: Any) -> None:
    (pinned, weights, *_), log = found
    assert [n for n in pinned if ".2." not in n] == ["model.layers.0.mlp.down_proj"]
    # Square roots of the truncated ratios e^1, which high=2 bounds, and e^-0.5.
    assert weights[0] == pytest.approx([2**0.5, 2.718281828**-0.25], rel=1e-6)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"step": 1, "loss": 0.25},
        {"step": 2, "loss": 0.5},
    ]


def test_recipe_with_its_corrector_is_valid_only_with_it(found: Any) -> None:
    *_, (code, output, _), (blocked, _, error) = found[0]
    assert code == 0 and "corrector: sqrt" in output
    assert blocked != 0
    assert "corrector 'sqrt' is not known; use one of is" in error

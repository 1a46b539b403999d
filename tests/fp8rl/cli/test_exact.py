"""``fp8rl exact`` with engines that are made up: what is asked of them, and what is said."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fp8rl import PluginManager, cli, hookimpl
from fp8rl.errors import OptionError
from fp8rl.plugins.adapters import Compared, Diagnosis, EngineAdapter, ExactRequest

EQUAL = [Compared("model.embed_tokens", 8, 8), Compared("end to end", 2, 2)]
DIFFERS = [EQUAL[0], Compared("model.norm", 10**8 - 1, 10**8), Compared("end to end", 0, 2)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Three layers in two files."""
    config = {"model_type": "llama", "num_hidden_layers": 3, "layer_types": ["full"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    names = ["model.embed_tokens.weight", *(f"model.layers.{i}.x.weight" for i in range(3))]
    names += [f"model.layers.0.self_attn.{x}_scale" for x in ("attn.q", "k")]  # as the demo leaves
    files = ["a.safetensors", "b.safetensors"] * 3
    for file in set(files):
        held = [name for name, place in zip(names, files, strict=True) if place == file]
        save_file({name: torch.ones(2) for name in held}, tmp_path / file)
    index = {"weight_map": dict(zip(names, files, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def run(rows: list[Compared], *arguments: str, replays: bool = True):
    seen: list[ExactRequest] = []
    tensors: list[str] = []

    def record(request: ExactRequest) -> None:
        seen.append(request)
        tensors.extend(load_file(request.model / "model.safetensors"))
        request.record.write_text("")

    def replay(request: ExactRequest) -> list[Compared]:
        assert request.record.is_file()
        return rows

    @hookimpl
    def register_engine_adapters():
        nothing = lambda: Diagnosis(None, ())  # noqa: E731
        return [
            EngineAdapter("a", nothing, record_exact=record),
            EngineAdapter("b", nothing, replay_exact=replay if replays else None),
        ]

    plugins = PluginManager(discover=False)
    plugin = ModuleType("test")
    vars(plugin).update(
        register_engine_adapters=register_engine_adapters,
        register_is_correctors=hookimpl(lambda: {"is": abs}),
    )
    plugins.register(plugin)
    result = CliRunner().invoke(cli.build_app(plugins), ["exact", *arguments])
    return result, seen, tensors


def test_equal_modules(model: Path) -> None:
    result, (request,), tensors = run(EQUAL, str(model))
    assert result.exit_code == 0, result.output
    assert "exact: true" in result.output and "100.0000%" in result.output
    assert request.recipe.exact and len(request.prompts) > 4
    assert not any("layers.2" in name for name in tensors) and len(tensors) == 3


def test_the_first_that_differs_is_named(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n")
    given = ["--prompts", str(prompts), "--recipe", '{"exact": false}', "--layers", "1"]
    result, (request,), tensors = run(DIFFERS, str(model), *given)
    assert result.exit_code == 1
    assert "Problem: The first that differs is 'model.norm'." in result.output
    assert "100.0000%  │ 1 " in result.output and "exact: false" in result.output
    assert request.prompts == ("one", "two") and not request.recipe.exact
    assert len(tensors) == 2


def test_both_engines_are_needed_and_a_text(model: Path, tmp_path: Path) -> None:
    result, _, _ = run(EQUAL, str(model), replays=False)
    assert isinstance(result.exception, OptionError) and "install both" in str(result.exception)
    result, _, _ = run(EQUAL, str(model), "--prompts", str(tmp_path / "none"))
    assert isinstance(result.exception, OptionError) and "cannot be read" in str(result.exception)

"""``fp8rl recipes``: in a clone, in a package that has them inside, and in one that lost them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp8rl import PluginManager
from fp8rl.cli import build_app
from fp8rl.errors import OptionError, UnsupportedError
from nemo_rl_ext import recipe_files
from support.sources import ROOT


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(PluginManager()), ["recipes", *arguments])


def test_the_list_names_the_folder_and_every_recipe() -> None:
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == str(ROOT / "recipes")
    stems = {file.stem for file in (ROOT / "recipes").glob("*.yaml")} - {"keys"}
    assert len(stems) == 15
    assert [line for line in lines if line in stems] == sorted(stems)
    for stem in stems:  # each says what it is for
        assert len(lines[lines.index(stem) + 1].strip()) > 20


def test_a_name_gives_the_path_alone() -> None:
    path = f"{ROOT / 'recipes' / 'qwen3-8b-fp8-kv-1n8g.yaml'}\n"
    assert run("qwen3-8b-fp8-kv-1n8g").stdout == run("qwen3-8b-fp8-kv-1n8g.yaml").stdout == path


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("moonlight-16b-fp8.yaml", "did you mean 'moonlight-16b-fp8-4n8g'?"),
        ("keys", "'fp8rl recipes' lists them."),
    ],
)
def test_an_unknown_name_is_refused(name: str, hint: str) -> None:
    error = run(name).exception
    assert isinstance(error, OptionError)
    assert str(error) == f"There is no recipe '{name}'; {hint}"


def test_a_package_without_them_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_files, "__file__", str(tmp_path / "nemo_rl_ext" / "recipe_files.py"))
    with pytest.raises(UnsupportedError, match=r"The recipes are neither in .* install fp8rl anew"):
        recipe_files.folder()


def test_every_recipe_has_its_parents_by_a_path_that_any_folder_gives() -> None:
    """A parent of upstream's by the variable, which is a full path; ours beside the recipe."""
    for file in (ROOT / "recipes").glob("*.yaml"):
        if file.stem == "keys":
            continue
        text = file.read_text(encoding="utf-8")
        parents = text.split("defaults:\n")[1].split("fp8rl:")[0].split("  - ")[1:]
        upstream, ours = (parent.strip() for parent in parents)
        assert upstream.startswith("${oc.env:NEMO_RL_CONFIGS}/") and upstream.endswith(".yaml")
        assert ours == "keys.yaml"

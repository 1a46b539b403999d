"""The ``fp8rl`` command line."""

from __future__ import annotations

import sys

import pytest
import yaml

import fp8rl
from fp8rl import Recipe, cli
from fp8rl.errors import RecipeError
from support.command import engines, run, run_main
from support.processes import run_code


def test_version_and_module_entry_without_torch():
    code = (
        "import sys; sys.argv = ['fp8rl', '--version']\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "import fp8rl.cli; print('torch' in sys.modules)\n"
        "import runpy; runpy.run_module('fp8rl', run_name='__main__')"
    )
    assert run_code(code).stdout.splitlines()[:2] == ["False", f"fp8rl {fp8rl.__version__}"]


def test_a_broken_plugin_is_named_and_does_not_stop_help(install, monkeypatch, capsys):
    install("import no_such_module", name="bad")
    code, out, err = run_main(monkeypatch, capsys, "--help")
    assert code == 0 and "doctor" in out
    assert "Warning: fp8rl plugin 'bad'" in err and "Traceback" not in err
    code, out, err = run_main(monkeypatch, capsys, "plugins")
    row = next(line for line in out.splitlines() if " bad " in line)
    assert code == 1 and "no_such_module" in err
    assert all(part in row for part in ("dist_of_bad", "2.5", "broken"))
    code, out, _ = run_main(monkeypatch, capsys, "doctor", "megatron")
    assert code == 1 and "Problem: fp8rl plugin 'bad'" in out


def test_plugins_add_commands(install, monkeypatch, capsys):
    head = "from fp8rl import hookimpl\n@hookimpl\ndef register_commands(app):\n"
    install(head + "    app.command('greet')(lambda: print('hello'))\n", name="polite")
    install(head + "    raise KeyError('no')\n", name="rude")
    code, out, err = run_main(monkeypatch, capsys, "greet")
    assert (code, out) == (0, "hello\n")
    assert "Warning: fp8rl plugin 'rude' cannot add its commands: KeyError: 'no'" in err


def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    code, out, err = run_main(monkeypatch, capsys, "recipe", '{"pins": {"layrs": [1]}}')
    assert (code, out) == (2, "")
    assert err == (
        "Error: Bad recipe: unknown key 'recipe.pins.layrs' (write 'recipe.pins.layers').\n"
    )


def test_debug_lets_the_traceback_through(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fp8rl", "--debug", "recipe", "nowhere.yaml"])
    with pytest.raises(RecipeError):
        cli.main()


def test_recipe_prints_all_defaults_as_yaml(tmp_path, monkeypatch):
    result = run(engines(), "recipe")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout) == Recipe().to_dict()

    path = tmp_path / "r.yaml"
    path.write_text("pins: {last: 1}\nimportance_sampling: {mode: off}\n")
    result = run(engines(), "recipe", str(path))
    printed = tmp_path / "printed.yaml"
    printed.write_text(result.stdout)
    assert Recipe.load(printed) == Recipe.load(path)

    monkeypatch.setenv("FP8RL_RECIPE", '{"rollout": false}')
    assert "rollout: false" in run(engines(), "recipe").stdout


@pytest.mark.parametrize("command", [("recipe",), ("pins", "--layers", "2", "--recipe")])
def test_recipe_with_an_unknown_corrector(command):
    result = run(engines(), *command, '{"importance_sampling": {"corrector": "xis"}}')
    assert isinstance(result.exception, RecipeError)
    assert "corrector 'xis' is not known; use one of is," in str(result.exception)

"""``fp8rl doctor``: a subcommand for each engine, with what that engine can look at."""

from __future__ import annotations

import json

import pytest

from fp8rl import Recipe
from fp8rl.errors import OptionError, PluginError
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, EngineAdapter, Section
from support.command import GOOD, SICK, engines, run


@pytest.mark.parametrize(
    ("diagnosis", "problem"),
    [
        (SICK, "Problem: sick: Version 0.1 is too old; install 1.2.3."),
        (ValueError("odd"), "Problem: sick: its diagnosis failed: ValueError: odd"),
    ],
)
def test_doctor_shows_engines_and_fails_on_problems(diagnosis, problem):
    result = run(engines(good=GOOD, sick=diagnosis), "doctor")
    assert result.exit_code == 1
    for part in (problem, "good", "1.2.3, 1.3", "cpu [really]", "ok"):
        assert part in result.stdout
    one = run(engines(good=GOOD, sick=diagnosis), "doctor", "good")
    assert one.exit_code == 0 and "sick" not in one.stdout


def test_an_engine_that_is_not_installed_is_a_problem_only_to_who_asks_for_it():
    """Trainers and rollout workers often have one engine each."""
    absent = Diagnosis(None, ("1.2.3",), problems=("Install absent.",))
    both = run(engines(absent=absent, good=GOOD), "doctor")
    assert both.exit_code == 0
    assert "not installed" in both.stdout and "Install absent" not in both.stdout
    asked = run(engines(absent=absent, good=GOOD), "doctor", "absent")
    assert asked.exit_code == 1
    assert "Problem: Install absent." in asked.stdout


def test_doctor_shows_what_an_engine_would_do_with_a_model_or_a_config(tmp_path):
    asked = []

    def examine(*request):
        asked.append(request)
        section = Section("layers", ("kind", "kernel"), (("o_proj", "[fast]"),))
        return Diagnosis("1.2.3", (), {"rollout": "FP8"}, ("Too big; use more.",), (section,))

    plugins = engines()
    plugins.engine_adapters = lambda: [
        EngineAdapter("alpha", lambda: GOOD, examine),
        EngineAdapter("beta", lambda: GOOD),
        EngineAdapter("gamma", lambda: SICK, examine_config=examine),
        EngineAdapter("sick", lambda: GOOD, lambda *request: 1 / 0),
        EngineAdapter("rude", lambda: GOOD, examine_config=lambda request: 1 / 0),
    ]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    recipe = Recipe.from_dict({"pins": {"last": 1}})
    model = (str(tmp_path), "--recipe", '{"pins": {"last": 1}}')
    file, source = tmp_path / "x.yaml", tmp_path / "source"
    more = ("--source", str(source), "--model", str(tmp_path), "--gpu-memory", "80")
    for result in (
        run(plugins, "doctor", "alpha", *model, "--tp", "2"),
        run(plugins, "doctor", "gamma", str(file), *more, *model[1:]),
    ):
        assert result.exit_code == 1
        for part in ("kernel", "[fast]", "Problem: Too big; use more."):
            assert part in result.stdout
    assert "rollout" in result.stdout  # the facts about a config
    assert asked == [(tmp_path, recipe, 2), (ConfigRequest(file, source, tmp_path, recipe, 80.0),)]
    result = run(plugins, "doctor", "beta", *model)
    assert result.exit_code == 0 and "last: 1" in result.stdout
    result = run(plugins, "doctor", "sick", *model)
    assert result.exit_code == 1
    assert "its look at the model failed: ZeroDivisionError" in result.stdout
    result = run(plugins, "doctor", "rude", str(file))
    assert isinstance(result.exception, PluginError)  # exit code 2: nothing can be told
    assert "rude: its look at the config failed: ZeroDivisionError" in str(result.exception)


def test_an_engine_has_the_options_that_it_reads():
    """Whatever else is asked of it ends with a usage error, and a name that nobody serves too."""
    plugins = engines()
    plugins.engine_adapters = lambda: [
        EngineAdapter("models", lambda: GOOD, lambda *request: GOOD),
        EngineAdapter("plain", lambda: GOOD, examine_environments=lambda source: GOOD),
    ]
    for words in ("models --gpu-memory 80", "models-environments", "sglang"):
        assert run(plugins, "doctor", *words.split()).exit_code == 2, words
    assert run(plugins, "doctor", "plain-environments").exit_code == 0
    for words, what in (
        ("models --tp 2", "need a model"),
        ("--json models", "Write --json behind 'models'"),
    ):
        error = run(plugins, "doctor", *words.split()).exception
        assert isinstance(error, OptionError) and what in str(error)
    with pytest.raises(PluginError, match="takes a model or a config"):
        EngineAdapter("both", lambda: GOOD, lambda *request: GOOD, lambda request: GOOD)


def test_json_has_all_that_the_tables_have(tmp_path):
    section = Section("layers", ("kind", "kernel"), (("o_proj", "fast"),))
    found = Diagnosis("1", (), sections=(section,))
    plugins = engines()
    plugins.engine_adapters = lambda: [EngineAdapter("alpha", lambda: SICK, lambda *request: found)]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    result = run(plugins, "doctor", "alpha", str(tmp_path), "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["problems"]) == (1, list(SICK.problems))
    (alpha,) = told["engines"].values()
    assert (alpha["installed"], alpha["supported"]) == (SICK.installed, list(SICK.supported))
    layers, pins = alpha["sections"]
    assert list(layers.values()) == ["layers", ["kind", "kernel"], [["o_proj", "fast"]]]
    assert "14 of 14 linear modules in FP8" in alpha["facts"]["pins"]
    assert pins["rows"][-1][0] == "0-1"

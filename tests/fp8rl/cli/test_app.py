"""The ``fp8rl`` command line."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import pytest
import torch
import yaml
from safetensors.torch import save_file
from typer.testing import CliRunner

import fp8rl
from fp8rl import PluginManager, Recipe, cli, hookimpl
from fp8rl.errors import OptionError, PinError, PluginError, RecipeError, UnsupportedError
from fp8rl.plugins.adapters import ConfigRequest, Diagnosis, EngineAdapter, Section
from support.processes import run_code

GOOD = Diagnosis("1.2.3", ("1.2.3", "1.3"), {"device": "cpu [really]"})
SICK = Diagnosis("0.1", ("1.2.3",), problems=("Version 0.1 is too old; install 1.2.3.",))


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FP8RL_RECIPE", raising=False)
    monkeypatch.delenv("FP8RL_DEBUG", raising=False)


def engines(**diagnoses: Diagnosis | Exception) -> PluginManager:
    """A manager with one plugin that serves these engines and the corrector ``is``."""

    def diagnose(result):
        def run() -> Diagnosis:
            if isinstance(result, Exception):
                raise result
            return result

        return run

    @hookimpl
    def register_engine_adapters():
        return [EngineAdapter(name, diagnose(result)) for name, result in diagnoses.items()]

    @hookimpl
    def register_is_correctors():
        return {"is": abs}

    plugins = PluginManager(discover=False)
    plugin = ModuleType("test")
    vars(plugin).update(
        register_engine_adapters=register_engine_adapters,
        register_is_correctors=register_is_correctors,
    )
    plugins.register(plugin)
    return plugins


def run(plugins: PluginManager, *arguments: str):
    return CliRunner().invoke(cli.build_app(plugins), arguments)


def run_main(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fp8rl", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    code = caught.value.code
    out, err = capsys.readouterr()
    return int(code or 0), out, err


def test_version_and_module_entry_without_torch():
    code = (
        "import sys; sys.argv = ['fp8rl', '--version']\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "import fp8rl.cli; print('torch' in sys.modules)\n"
        "import runpy; runpy.run_module('fp8rl', run_name='__main__')"
    )
    assert run_code(code).stdout.splitlines()[:2] == ["False", f"fp8rl {fp8rl.__version__}"]


def test_plugins_lists_the_own_ones(monkeypatch, capsys):
    code, out, _ = run_main(monkeypatch, capsys, "plugins")
    assert code == 0
    for name, hook in (("nemo_rl", "register_is_correctors"), ("vllm", ""), ("megatron", "")):
        row = next(line for line in out.splitlines() if f" {name} " in line)
        assert hook in row
        assert fp8rl.__version__ in row


def test_a_broken_plugin_is_named_and_does_not_stop_help(install, monkeypatch, capsys):
    install("import no_such_module", name="bad")
    code, out, err = run_main(monkeypatch, capsys, "--help")
    assert code == 0
    assert "doctor" in out
    assert "Warning: fp8rl plugin 'bad'" in err
    assert "Traceback" not in err

    code, out, err = run_main(monkeypatch, capsys, "plugins")
    assert code == 1
    row = next(line for line in out.splitlines() if " bad " in line)
    for part in ("dist_of_bad", "2.5", "broken"):
        assert part in row
    assert "no_such_module" in err

    code, out, _ = run_main(monkeypatch, capsys, "doctor", "megatron")
    assert code == 1
    assert "Problem: fp8rl plugin 'bad'" in out


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


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_lets_the_traceback_through(monkeypatch, how):
    arguments = ["recipe", "nowhere.yaml"]
    if how == "option":
        arguments.insert(0, "--debug")
    else:
        monkeypatch.setenv("FP8RL_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["fp8rl", *arguments])
    with pytest.raises(RecipeError):
        cli.main()


def test_no_arguments_shows_help():
    result = run(engines())
    assert "Usage" in result.output
    assert "recipe" in result.output


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


@pytest.mark.parametrize("command", [("recipe",), ("doctor", "--layers", "2", "--recipe")])
def test_recipe_with_an_unknown_corrector(command):
    result = run(engines(), *command, '{"importance_sampling": {"corrector": "xis"}}')
    assert isinstance(result.exception, RecipeError)
    assert "corrector 'xis' is not known; use one of is," in str(result.exception)


def test_doctor_shows_engines():
    result = run(engines(alpha=GOOD, beta=GOOD), "doctor")
    assert result.exit_code == 0
    for part in ("alpha", "beta", "1.2.3, 1.3", "cpu [really]", "ok"):
        assert part in result.stdout
    one = run(engines(alpha=GOOD, beta=GOOD), "doctor", "beta")
    assert "alpha" not in one.stdout


@pytest.mark.parametrize(
    ("diagnosis", "problem"),
    [
        (SICK, "Problem: sick: Version 0.1 is too old; install 1.2.3."),
        (ValueError("odd"), "Problem: sick: its diagnosis failed: ValueError: odd"),
    ],
)
def test_doctor_fails_on_problems(diagnosis, problem):
    result = run(engines(good=GOOD, sick=diagnosis), "doctor")
    assert result.exit_code == 1
    assert problem in result.stdout
    assert "good" in result.stdout
    assert run(engines(good=GOOD, sick=diagnosis), "doctor", "good").exit_code == 0


def test_an_engine_that_is_not_installed_is_a_problem_only_to_who_asks_for_it():
    """Trainers and rollout workers often have one engine each."""
    absent = Diagnosis(None, ("1.2.3",), problems=("Install absent.",))
    both = run(engines(absent=absent, good=GOOD), "doctor")
    assert both.exit_code == 0
    assert "not installed" in both.stdout and "Install absent" not in both.stdout
    asked = run(engines(absent=absent, good=GOOD), "doctor", "absent")
    assert asked.exit_code == 1
    assert "Problem: absent: Install absent." in asked.stdout


def test_doctor_shows_what_an_engine_would_do_with_a_model(tmp_path):
    asked = []

    def examine(*request):
        asked.append(request)
        sections = (
            Section("layers", ("kind", "kernel"), (("o_proj", "[fast]"),)),
            Section("memory", ("", ""), (("weights", "1 GiB"),)),
        )
        return Diagnosis("1.2.3", (), problems=("Too big; use more GPUs.",), sections=sections)

    plugins = engines()
    adapter = EngineAdapter("alpha", lambda: GOOD, examine)
    plugins.engine_adapters = lambda: [adapter, EngineAdapter("beta", lambda: GOOD)]
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    model = ("--model", str(tmp_path), "--recipe", '{"pins": {"last": 1}}')
    result = run(plugins, "doctor", "alpha", *model, "--tp", "2")
    assert result.exit_code == 1
    assert asked == [(tmp_path, Recipe.from_dict({"pins": {"last": 1}}), 2)]
    for part in ("kernel", "[fast]", "memory", "1 GiB", "Problem: alpha: Too big; use more GPUs."):
        assert part in result.stdout
    assert run(plugins, "doctor", "beta", *model).exit_code == 0
    assert run(plugins, "doctor", *model).exit_code == 0
    assert len(asked) == 1

    adapter = EngineAdapter("alpha", lambda: GOOD, lambda *request: 1 / 0)
    result = run(plugins, "doctor", "alpha", *model)
    assert result.exit_code == 1
    assert "alpha: its look at the model failed: ZeroDivisionError" in result.stdout


def test_doctor_shows_what_an_engine_would_do_with_a_config(tmp_path):
    asked = []

    def examine_config(request):
        asked.append(request)
        section = Section("keys", ("key", "becomes"), (("a", "[b]"),))
        return Diagnosis("1.2.3", (), {"rollout": "FP8"}, sections=(section,))

    plugins = engines()
    good = EngineAdapter("alpha", lambda: SICK, examine_config=examine_config)
    plugins.engine_adapters = lambda: [good, EngineAdapter("beta", lambda: GOOD)]
    file, source, model = (tmp_path / name for name in ("x.yaml", "source", "model"))
    more = ("--source", str(source), "--model", str(model), "--gpu-memory", "80")
    given = ("--config", str(file), *more, "--recipe", '{"pins": {"last": 1}}')
    result = run(plugins, "doctor", "alpha", *given)
    assert result.exit_code == 0, result.output
    recipe = Recipe.from_dict({"pins": {"last": 1}})
    assert asked == [ConfigRequest(file, source, model, recipe, 80.0)]
    for part in ("rollout", "FP8", "becomes", "[b]"):
        assert part in result.stdout
    result = run(plugins, "doctor", "beta", "--config", str(file))
    assert isinstance(result.exception, OptionError)
    assert "--config needs an engine that looks at configs (alpha)" in str(result.exception)

    good = EngineAdapter("alpha", lambda: GOOD, examine_config=lambda request: 1 / 0)
    result = run(plugins, "doctor", "alpha", "--config", str(file))
    assert isinstance(result.exception, PluginError)  # exit code 2: nothing can be told
    assert "alpha: its look at the config failed: ZeroDivisionError" in str(result.exception)


def test_doctor_with_an_unknown_engine():
    result = run(engines(alpha=GOOD), "doctor", "sglang")
    assert isinstance(result.exception, UnsupportedError)
    assert "'sglang'; known engines: alpha" in str(result.exception)


def table_rows(output: str) -> dict[str, tuple[str, str]]:
    rows = [line.split("│")[1:-1] for line in output.splitlines() if line.startswith("│")]
    return {r[0].strip(): (r[1].strip(), r[2].strip()) for r in rows if len(r) == 3}


def test_doctor_resolves_pins():
    recipe = '{"pins": {"last": 1, "names": ["*.0.mlp.down_proj"]}}'
    result = run(engines(), "doctor", "--recipe", recipe, "--layers", "5")
    assert result.exit_code == 0, result.output
    every = "qkv_proj, o_proj, gate_up_proj, down_proj"
    rows = table_rows(result.stdout)
    assert rows["0"] == (every.removesuffix(", down_proj"), "down_proj (names: *.0.mlp.down_proj)")
    assert rows["1-3"] == (every, "")
    assert rows["4"] == ("", ", ".join(f"{kind} (last: 1)" for kind in every.split(", ")))
    assert rows["outside"][0] == ""
    assert "lm_head (always: lm_head)" in rows["outside"][1]
    assert "27 of 35 linear modules in FP8" in result.stdout


def test_doctor_with_pins_of_plugins(install, monkeypatch, capsys):
    code = "from fp8rl import hookimpl\nfrom fp8rl.recipe import Pins\n@hookimpl\n"
    install(code + "def register_pins(module_names): return Pins(first=1)", name="pinner")
    code, out, _ = run_main(monkeypatch, capsys, "doctor", "megatron", "--layers", "2")
    assert "o_proj (first: 1)" in table_rows(out)["0"][1]


def test_doctor_without_a_size_validates_the_recipe():
    result = run(engines(), "doctor", "--recipe", "{}")
    assert "pins need --layers or --model" in result.stdout
    result = run(engines(), "doctor", "--recipe", '{"pins": {"layers": [7]}}', "--layers", "5")
    assert isinstance(result.exception, PinError)


def moe_names() -> list[str]:
    names = [f"model.layers.{i}.mlp.experts.0.{p}_proj" for i in (10, 2) for p in ("up", "gate")]
    return [*names, "model.layers.2.mlp.gate", "lm_head"]


def write_model(folder, kind: str) -> None:
    tensors = [f"{name}.weight" for name in moe_names()] + ["model.layers.2.self_attn.q_proj.bias"]
    file = "model.safetensors" if kind == "single" else "x.safetensors"
    save_file({name: torch.zeros(1) for name in tensors}, folder / file)
    if kind == "index":
        index = {"weight_map": dict.fromkeys(tensors, file)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["index", "single"])
def test_doctor_takes_names_from_the_weights(tmp_path, kind):
    write_model(tmp_path, kind)
    result = run(engines(), "doctor", "--model", str(tmp_path))
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert list(rows) == ["outside", "2", "10"]
    assert rows["10"] == ("experts", "")
    assert rows["2"] == ("experts", "router (always: router)")


@pytest.mark.parametrize("nested", [False, True])
def test_doctor_takes_the_layers_from_the_config(tmp_path, nested):
    config = {"num_hidden_layers": 4}
    config = {"text_config": config} if nested else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(engines(), "doctor", "--model", str(tmp_path), "--recipe", '{"pins":{"first":1}}')
    assert {"outside", "0", "1-3"} == set(table_rows(result.stdout))


def test_doctor_knows_the_names_of_a_mixture_by_its_config(tmp_path):
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 2}
    config |= {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(engines(), "doctor", "--model", str(tmp_path))
    rows = table_rows(result.stdout)
    assert rows["0-2"] == ("qkv_proj, o_proj, gate_up_proj, down_proj", "")
    assert rows["3"] == ("qkv_proj, o_proj, experts", "router (always: router)")


CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
MIXTURE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 2}


def stored(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, whatever it is."""
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def row(*offsets: int) -> dict:
    return {"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, None, "config.json' cannot be read (No such file or directory); give the folder of"),
        (CONFIG, "{", "config.json is not valid JSON: Expecting property name"),
        (CONFIG, "", "config.json is not valid JSON: Expecting value"),
        (CONFIG, b"\xff\xfe\x00", "config.json' is not UTF-8 text ('utf-8' codec"),
        (CONFIG, "[" * 20000, "config.json is not valid JSON: it is nested too deeply"),
        (CONFIG, "9" * 5000, "config.json is not valid JSON: Exceeds the limit"),
        (CONFIG, [1, 2], "config.json' holds a list, not a JSON object; correct it."),
        (CONFIG, None, "config.json' holds a NoneType, not a JSON object"),
        (CONFIG, {}, "config.json' has no key 'num_hidden_layers'; correct it"),
        (CONFIG, {"text_config": {"a": 1}}, "config.json' has no key 'num_hidden_layers'"),
        (CONFIG, {"text_config": [1]}, "config.json': the model's text_config is [1]; correct it"),
        (
            CONFIG,
            {"model_type": ["x"]},
            "config.json': the model's model_type is ['x']; correct it",
        ),
        (
            CONFIG,
            {"text_config": {"model_type": 3}},
            "config.json': the model's text_config.model_type is 3; correct it to a name",
        ),
        *(
            (
                CONFIG,
                {"num_hidden_layers": value},
                f"num_hidden_layers is {shown}; correct it to an",
            )
            for value, shown in [
                (-3, "-3"),
                (0, "0"),
                (True, "True"),
                (2.0, "2.0"),
                ("2", "'2'"),
                (None, "None"),
                ([2], "[2]"),
                (10**12, "1000000000000"),
            ]
        ),
        (
            CONFIG,
            {"num_hidden_layers": 2, "num_experts": 8},
            "has no weights to take its module names from",
        ),
        (CONFIG, MIXTURE | {"num_experts": 0}, "num_experts is 0; correct it"),
        (
            CONFIG,
            MIXTURE | {"num_hidden_layers": 9000, "num_experts": 9000},
            "number of experts in all layers is 81000000; correct it to an integer from 1 to",
        ),
        (CONFIG, MIXTURE | {"num_local_experts": "8"}, "num_local_experts is '8'; correct it"),
        (CONFIG, MIXTURE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; correct it"),
        (CONFIG, MIXTURE | {"mlp_only_layers": 1}, "mlp_only_layers is 1; correct it to a list"),
        (
            CONFIG,
            {**MIXTURE, "num_experts": 2, "model_type": "x"},
            "has no weights to take its module names from",
        ),
        (INDEX, "{", "index.json is not valid JSON"),
        (INDEX, [], "index.json' holds a list"),
        (INDEX, {}, "index.json' has no weight_map from tensors to files; download"),
        (INDEX, {"weight_map": []}, "index.json' has no weight_map from tensors to files"),
        (INDEX, {"weight_map": {"a.weight": 3}}, "index.json' has no weight_map from tensors to"),
        (INDEX, {"weight_map": {}}, "' holds no weight; download the model again."),
        (INDEX, {"weight_map": {"a.weight": "b"}}, "index.json' names 'b', which is not there"),
        (INDEX, {"weight_map": {"a.weight": "."}}, "names '.', which is no name of a file in its"),
        (INDEX, {"weight_map": {"a.weight": "../b"}}, "names '../b', which is no name of a file"),
        (INDEX, {"weight_map": {"a.weight": "/etc/b"}}, "names '/etc/b', which is no name of a f"),
        (INDEX, '{"weight_map": {"a": "b", "a": "c"}}', "index.json.weight_map.a' is given twice"),
        (INDEX, {"weight_map": {"a.bias": INDEX}}, "' holds no weight; download the model again."),
        (WEIGHTS, "", "model.safetensors' is no whole safetensors file ("),
        (WEIGHTS, "version https://git-lfs.github.com/spec/v1", "is no whole safetensors file ("),
        (WEIGHTS, stored({}, length=2**63), "is no whole safetensors file ("),
        (WEIGHTS, stored({}, length=100), "is no whole safetensors file ("),
        (WEIGHTS, stored([]), "is no whole safetensors file ("),
        (WEIGHTS, stored({"a.weight": {}}), "is no whole safetensors file ("),
        (WEIGHTS, stored(row(0, 4), b"\0" * 3), "is no whole safetensors file ("),
        (WEIGHTS, stored({}), "' holds no weight; download the model again."),
    ],
)
def test_doctor_with_a_bad_model_folder(tmp_path, monkeypatch, capsys, file, content, message):
    if file is not None:
        if isinstance(content, str):
            content = content.encode()
        elif not isinstance(content, bytes):
            content = json.dumps(content).encode()
        (tmp_path / file).write_bytes(content)
    code, out, err = run_main(monkeypatch, capsys, "doctor", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("Error: ") and err.count("\n") == 1 and err.count(str(tmp_path)) == 1


def test_doctor_with_a_model_that_is_no_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "folder" / CONFIG).mkdir(parents=True)
    for model, message in [
        ("file", "file/config.json' cannot be read (Not a directory); give the folder of"),
        ("nowhere", "nowhere/config.json' cannot be read (No such file or directory); give"),
        ("folder", "folder/config.json' cannot be read (Is a directory); give the folder"),
        ("x" * 300, "cannot be read (File name too long); give the folder"),
    ]:
        code, out, err = run_main(monkeypatch, capsys, "doctor", "--model", str(tmp_path / model))
        assert (code, out) == (2, "")
        assert message in err and err.count("\n") == 1


def test_doctor_takes_odd_names_as_they_are(tmp_path):
    for name in ("model.layers.²x.²٣", "model.layers.0.[/red]"):
        save_file({f"{name}.weight": torch.zeros(1)}, tmp_path / WEIGHTS)
        recipe = '{"pins": {"names": ["model.*"]}}'
        result = run(engines(), "doctor", "--model", str(tmp_path), "--recipe", recipe)
        assert result.exit_code == 0, result.exception
        assert name in result.stdout


def test_doctor_wants_a_model_for_the_ranks(tmp_path):
    """It said nothing of 7 ranks without an engine, which looked like consent."""
    looks = EngineAdapter("alpha", lambda: GOOD, lambda *request: GOOD)
    plugins = engines()
    plugins.engine_adapters = lambda: [looks, EngineAdapter("beta", lambda: GOOD)]
    (tmp_path / CONFIG).write_text('{"num_hidden_layers": 2}')
    model = ("--model", str(tmp_path))
    for arguments in (
        (),
        model,
        ("alpha",),
        ("alpha", "--layers", "2"),
        ("beta", *model),
    ):
        result = run(plugins, "doctor", *arguments, "--tp", "7")
        assert isinstance(result.exception, OptionError), arguments
        assert "--tp says how an engine splits a model: give it with --model and" in str(
            result.exception
        )
    assert run(plugins, "doctor", "alpha", *model, "--tp", "7").exit_code == 0


def test_doctor_wants_one_size(tmp_path):
    result = run(engines(), "doctor", "--model", str(tmp_path), "--layers", "2")
    assert isinstance(result.exception, OptionError)
    assert "--layers or --model, not both" in str(result.exception)

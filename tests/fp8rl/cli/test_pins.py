"""``fp8rl pins``: which modules of a model are in FP8, and why."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from fp8rl.errors import OptionError
from support.command import engines, run, run_main, table_rows

CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"


def test_pins_are_resolved():
    recipe = '{"pins": {"last": 1, "names": ["*.0.mlp.down_proj"]}}'
    result = run(engines(), "pins", "--recipe", recipe, "--layers", "5")
    assert result.exit_code == 0, result.output
    every = "qkv_proj, o_proj, gate_up_proj, down_proj"
    rows = table_rows(result.stdout)
    assert rows["0"] == (every.removesuffix(", down_proj"), "down_proj (names: *.0.mlp.down_proj)")
    assert rows["1-3"] == (every, "")
    assert rows["4"] == ("", ", ".join(f"{kind} (last: 1)" for kind in every.split(", ")))
    assert rows["outside"][0] == ""
    assert "lm_head (always: lm_head)" in rows["outside"][1]
    assert "27 of 35 linear modules in FP8" in result.stdout


@pytest.mark.parametrize("kind", ["index", "single"])
def test_pins_takes_names_from_the_weights(tmp_path, kind):
    names = [f"model.layers.{i}.mlp.experts.0.{p}_proj" for i in (10, 2) for p in ("up", "gate")]
    names += ["model.layers.2.mlp.gate", "lm_head", "model.layers.2.[/red]"]
    tensors = [*(f"{name}.weight" for name in names), "model.layers.2.self_attn.q_proj.bias"]
    file = WEIGHTS if kind == "single" else "x.safetensors"
    save_file({name: torch.zeros(1) for name in tensors}, tmp_path / file)
    if kind == "index":
        index = {"weight_map": dict.fromkeys(tensors, file)}
        (tmp_path / INDEX).write_text(json.dumps(index))
    recipe = '{"pins": {"names": ["*red?"]}}'
    result = run(engines(), "pins", str(tmp_path), "--recipe", recipe)
    assert result.exit_code == 0, result.output
    rows = table_rows(result.stdout)
    assert list(rows) == ["outside", "2", "10"]
    assert rows["10"] == ("experts", "")
    assert rows["2"][0].startswith("experts") and "router (always: router)" in rows["2"][1]
    assert "[/red]" in result.stdout


MIXTURE = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 2}


def stored(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with this header, whatever it is."""
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ROW = {"a.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (None, None, "config.json' cannot be read (No such file or directory); give the folder of"),
        (CONFIG, "{", "config.json is not valid JSON: Expecting property name"),
        (CONFIG, b"\xff\xfe\x00", "config.json' is not UTF-8 text ('utf-8' codec"),
        (CONFIG, {}, "config.json' has no key 'num_hidden_layers'; correct it"),
        (CONFIG, {"text_config": [1]}, "config.json': the model's text_config is [1]; correct it"),
        (
            CONFIG,
            {"text_config": {"model_type": 3}},
            "config.json': the model's text_config.model_type is 3; correct it to a name",
        ),
        *(
            (CONFIG, {"num_hidden_layers": value}, f"num_hidden_layers is {value}; correct it to")
            for value in (0, True, 10**12)
        ),
        (
            CONFIG,
            {"num_hidden_layers": 2, "num_experts": 8},
            "has no weights to take its module names from",
        ),
        (
            CONFIG,
            MIXTURE | {"num_hidden_layers": 9000, "num_experts": 9000},
            "number of experts in all layers is 81000000; correct it to an integer from 1 to",
        ),
        (CONFIG, MIXTURE | {"num_local_experts": "8"}, "num_local_experts is '8'; correct it"),
        (CONFIG, MIXTURE | {"mlp_only_layers": 1}, "mlp_only_layers is 1; correct it to a list"),
        (INDEX, [], "index.json' holds a list"),
        (INDEX, {"weight_map": {"a.weight": 3}}, "index.json' has no weight_map from tensors to"),
        (INDEX, {"weight_map": {"a.weight": "b"}}, "index.json' names 'b', which is not there"),
        (INDEX, {"weight_map": {"a.bias": INDEX}}, "' holds no weight; download the model again."),
        (WEIGHTS, stored({}, length=2**63), "is no whole safetensors file ("),
        (WEIGHTS, stored(ROW, b"\0" * 3), "is no whole safetensors file ("),
    ],
)
def test_pins_with_a_bad_model_folder(tmp_path, monkeypatch, capsys, file, content, message):
    if file is not None:
        if isinstance(content, str):
            content = content.encode()
        elif not isinstance(content, bytes):
            content = json.dumps(content).encode()
        (tmp_path / file).write_bytes(content)
    code, out, err = run_main(monkeypatch, capsys, "pins", str(tmp_path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("Error: ") and err.count("\n") == 1 and err.count(str(tmp_path)) == 1


@pytest.mark.parametrize("arguments", [(), ("model", "--layers", "2")])
def test_one_size_is_wanted(arguments):
    result = run(engines(), "pins", *arguments)
    assert isinstance(result.exception, OptionError)
    assert "either the folder of a model or --layers" in str(result.exception)

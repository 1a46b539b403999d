"""The recipe: defaults, sources, and one clear error for each way to get it wrong."""

from __future__ import annotations

import json
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.errors import Fp8RLError, RecipeError
from fp8rl.recipe import RECIPE_ENV, Pins, Recipe

FULL = {
    "rollout": True,
    "training": False,
    "weights": {"block": [128, 128], "scale_format": "pow2"},
    "activations": {"group": 128, "scale_format": "pow2"},
    "pins": {
        "layers": [0, -1],
        "first": 1,
        "last": 2,
        "names": ["model.layers.*.mlp.down_proj"],
        "kinds": ["o_proj"],
        "fp8": ["*.kv_b_proj"],
    },
    "kv_cache": {"dtype": "auto", "recalibrate": "grow", "margin": 1.5, "in_training": False},
    "rope_dtype": "float32",
    "importance_sampling": {
        "corrector": "is",
        "level": "sequence",
        "mode": "clip",
        "low": 0.5,
        "high": 4.0,
        "self_normalize": True,
        "log_ratio_clamp": 10.0,
        "token_veto": 1e-4,
        "rejection": {"level": "geometric", "low": 0.9, "high": 1.1},
    },
    "exact": False,
    "allow_untested_gpu": True,
}


def test_default_is_the_published_recipe():
    recipe = Recipe()
    assert recipe.rollout and recipe.training and recipe.pins == Pins()
    assert (recipe.weights.block, recipe.activations.group) == ((128, 128), 128)
    assert recipe.weights.scale_format == recipe.activations.scale_format == "fp32"
    assert recipe.kv_cache.dtype == "fp8_e4m3" and recipe.kv_cache.has_scales
    sampling = recipe.importance_sampling
    assert (sampling.level, sampling.mode, sampling.high) == ("token", "truncate", 2.0)
    assert Recipe.from_dict({}) == Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_load_from_a_file(tmp_path, suffix):
    path = tmp_path / f"recipe{suffix}"
    for data in (FULL, {"fp8rl": FULL}):
        path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
        assert Recipe.load(path) == Recipe.load(str(path)) == Recipe.from_dict(FULL)
    path.write_text("{}" if suffix == ".json" else "# a comment\n")
    assert Recipe.load(path) == Recipe()


def test_from_env(monkeypatch, tmp_path):
    monkeypatch.delenv(RECIPE_ENV, raising=False)
    monkeypatch.setenv("FP8_RECIPE", "{}")  # of Transformer Engine's scripts
    assert Recipe.from_env() is None
    for misspelled in ("FP8RL_RECIPES", "VLLM_FP8RL_RECIPE"):
        with monkeypatch.context() as patch:
            patch.setenv(misspelled, "{}")
            with pytest.raises(RecipeError, match=f"'{misspelled}' is not .*write '{RECIPE_ENV}'"):
                Recipe.from_env()
    path = tmp_path / "r.yaml"
    path.write_text("rollout: false")
    for source in ('{"rollout": false}', str(path)):
        monkeypatch.setenv(RECIPE_ENV, source)
        assert Recipe.from_env() == Recipe(rollout=False)
    monkeypatch.setenv(RECIPE_ENV, '{"pins": {"layer": [1]}}')
    with pytest.raises(RecipeError, match=rf"unknown key '{RECIPE_ENV}\.pins\.layer'"):
        Recipe.from_env()


REFUSED: list[tuple[Any, str]] = [
    # Mappings; all mistakes are told at once.
    (
        {"rolout": True, "pins": {"first": -1}, "kv_cache": {"margin": "much"}},
        r"'recipe\.pins\.first'.*'recipe\.kv_cache\.margin'.*'recipe\.rolout'",
    ),
    ({"weights": {"block": [64, 128]}}, "recipe.weights.block.0"),
    ({"importance_sampling": {"mode": "clip"}}, "mode 'clip' needs 'low'"),
    ({"importance_sampling": {"low": 0.5}}, "'low' has no meaning with mode 'truncate'"),
    (
        {"importance_sampling": {"mode": "clip", "low": 3, "high": 2}},
        r"low=3\.0 must be below high=2\.0",
    ),
    ({"importance_sampling": {"rejection": {}}}, "rejection needs 'low' or 'high'"),
    (
        {"exact": True, "training": False},
        r"training and \(over a cache of 8 bits\) kv_cache\.in_training to be true",
    ),
    ({"exact": True, "kv_cache": {"in_training": False}}, "kv_cache.in_training to be true"),
    ({"allow_untested_gpu": True}, "allow_untested_gpu needs training: false, and weights.sc"),
    ({"pins": {"layers": [True]}}, r"^Bad recipe: '.*\.0' must be a valid integer, not True\.$"),
    ({"pins": {"names": "o_proj"}}, r"'recipe\.pins\.names' must be a list, not 'o_proj'\.$"),
    ([1, 2], "recipe must be a mapping of recipe keys, not list"),
    *(
        ({key: value}, rf"unknown key 'recipe\.{key}.* \(write {meant}\)")
        for key, value, meant in (
            ("rolout", 1, r"'recipe\.rollout'"),
            ("pins", {"layrs": 1}, r"'recipe\.pins\.layers'"),
            ("KV-Cache", 1, r"'recipe\.kv_cache'"),
            ("kv_cache_dtype", 1, r"'recipe\.kv_cache\.dtype'"),
            ("scale_format", 1, "'recipe.weights.* or 'recipe.activations.scale_format'"),
        )
    ),
    # Content of a JSON file, of YAML files.
    (("r.json", "{"), "r.json is not valid JSON: Expecting property name"),
    (("r.json", '{"a": ' * 20000), "r.json is not valid JSON: it is nested too deeply."),
    (
        ("r.yaml", "pins:\n  layers: [1"),
        "r.yaml is not valid YAML at line 2, column 13: while parsing a flow sequence, "
        "expected ',' or ']', but got '<stream end>'.",
    ),
    (("r.yaml", "a: 1\nb: \x01"), "r.yaml is not valid YAML at line 2: character #x0001"),
    (("r.yaml", "a: !!timestamp 2026-13-45"), "holds a value that YAML cannot read: month must be"),
    (("r.yaml", "a: &a [*a]"), "unknown key"),
    (("r.yaml", "pins: {layrs: [1]}"), "r.yaml.pins.layrs'"),
    (("r.yaml", "pins:\n  layers:\n  - a: 1\n    a: 2\n"), "pins.layers.0.a' is given twice, in l"),
    # What is no source.
    (None, "a NoneType; give a path"),
    ("/nowhere.yaml", r"nowhere\.yaml' does not exist; give a path or a JSON"),
    ("/", "' is a folder; give the path of the recipe file in it"),
    ("{not json", "recipe is not valid JSON"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refused(tmp_path, given, message):
    with pytest.raises(RecipeError, match=message) as caught:
        if isinstance(given, dict | list):
            Recipe.from_dict(given)
        elif isinstance(given, tuple):
            file = Path(tmp_path, given[0])
            file.write_text(given[1])
            Recipe.load(file)
        else:
            Recipe.load(given)
    assert isinstance(caught.value, Fp8RLError) and isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def leaves(data: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in data.items():
        found += leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]
    return found


def changed(path: tuple[str, ...], value: Any) -> dict:
    """``FULL`` with one value replaced."""
    data = json.loads(json.dumps(FULL))
    reduce(dict.__getitem__, path[:-1], data)[path[-1]] = value
    return data


WRONG: dict[type, list[Any]] = {
    bool: [1, 0.0, "true", "off"],
    int: [True, 1.0, "1"],
    float: [True, "1.5"],
    str: [True, 1],
}


def test_nothing_is_cast_and_every_section_names_an_unknown_key():
    """Each of these is a value that YAML makes by itself, and that Python would convert."""
    for path in leaves(FULL):
        right = reduce(dict.__getitem__, path, FULL)
        for wrong in WRONG[type(right[-1] if isinstance(right, list) else right)]:
            given = [*right[:-1], wrong] if isinstance(right, list) else wrong
            with pytest.raises(RecipeError) as caught:
                Recipe.from_dict(changed(path, given))
            assert f"'recipe.{'.'.join(path)}" in str(caught.value), given
        unknown = (*path[:-1], "typo")
        with pytest.raises(RecipeError) as caught:
            Recipe.from_dict(changed(unknown, 1), where="policy.megatron_cfg.fp8rl")
        assert f"unknown key 'policy.megatron_cfg.fp8rl.{'.'.join(unknown)}'" in str(caught.value)


def test_exponents_need_no_dot_in_yaml(tmp_path):
    """YAML 1.1, which PyYAML reads, takes ``1e-4`` for a string."""
    path = tmp_path / "recipe.yaml"
    for number in ("1e-4", "1E-4", "0.0001", ".1e-3", "1.e-4", "+.0001"):
        path.write_text(f"importance_sampling: {{token_veto: {number}}}")
        assert Recipe.load(path).importance_sampling.token_veto == 1e-4
        path.write_text(f"importance_sampling: {{token_veto: '{number}'}}")
        with pytest.raises(RecipeError, match="token_veto' must be a valid number, not '"):
            Recipe.load(path)


NUMBERS = ("010", "08", "0o10", "1_0", "0b1010", "0x1_0", "1:30", "+01", "1_:30", "+0x10")
OTHERS_IN_YAML = [
    # PyYAML reads 010 as 8 and 1:30 as 90, YAML 1.2 as 10 and as text.
    *((f"pins: {{layers: [1, {n}]}}", f"r.yaml.pins.layers.1' is {n}, which") for n in NUMBERS),
    ("pins: {layers: [!!int '010']}", "r.yaml.pins.layers.0' is 010, which YAML 1.1 and"),
    *(
        (f"importance_sampling: {{high: {n}}}", f"importance_sampling.high' is {n}, which")
        for n in ("1_0.5", "1:30.5", "1_000", ".5_0", "1_0.5e-3")
    ),
    # Words of YAML 1.1 are no booleans, and dates are text.
    *(
        (f"training: {word}", "training' must be true or false, not ")
        for word in ("yes", "off", "Off", "y", "2026-11-28", ".inf")
    ),
    *(
        (f"kv_cache: {{margin: {word}}}", "kv_cache.margin' must be a finite number")
        for word in (".inf", "-.inf", ".nan", "1e999")
    ),
]


def test_what_yaml_1_1_and_1_2_read_differently(tmp_path):
    path = tmp_path / "r.yaml"
    for text, message in OTHERS_IN_YAML:
        path.write_text(text)
        with pytest.raises(RecipeError) as caught:
            Recipe.load(path)
        assert message in str(caught.value), text
    path.write_text(
        "training: True\nactivations: &a {scale_format: pow2}\nweights: {<<: *a, block: [128, 128]}"
        "\n"
        "pins: {layers: [1, 10, -2, +3, 0x10, 0], names: ['010', '1:30']}"
    )
    recipe = Recipe.load(path)
    assert recipe.training is True and recipe.weights.scale_format == "pow2"
    assert recipe.pins == Pins(layers=(1, 10, -2, 3, 16, 0), names=("010", "1:30"))


@pytest.mark.parametrize(
    "path", [("exact",), ("pins",), ("importance_sampling", "rejection", "low")], ids=".".join
)
def test_a_key_twice_is_an_error(tmp_path, path):
    """Both parsers would keep the last one: a pin would be lost without a word."""
    marked = json.dumps(changed(path, "HERE"), indent=1)
    value = json.dumps(reduce(dict.__getitem__, path, FULL))
    twice = marked.replace('"HERE"', f'{value},\n"{path[-1]}": {value}')
    dotted = ".".join(path)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(twice)
    assert str(caught.value) == f"'recipe.{dotted}' is given twice; keep one of them."
    line = marked[: marked.index('"HERE"')].count("\n") + 1
    file = tmp_path / "r.yaml"
    file.write_text(twice)  # JSON is YAML
    told = rf"r.yaml.{dotted}' is given twice, in lines {line} and {line + 1}; keep"
    with pytest.raises(RecipeError, match=told):
        Recipe.load(file)


def test_merged_pins_are_the_union():
    one = Pins(layers=(0, 3), first=1, last=2, names=("a", "b.*"), kinds=("o_proj",))
    merged = one.merged(
        Pins(layers=(3, -1), first=2, names=("a",), kinds=("down_proj",), fp8=("c",))
    )
    assert set(merged.layers) == {0, 3, -1} and len(merged.layers) == 3
    assert (merged.first, merged.last, merged.fp8) == (2, 2, ("c",))
    assert set(merged.names) == {"a", "b.*"} and len(merged.names) == 2
    assert set(merged.kinds) == {"o_proj", "down_proj"}


@pytest.mark.parametrize(("kind", "margin"), [("refit", 1.05), ("grow", 2.0), ("start", 4.0)])
def test_scales_that_last_have_more_headroom(kind, margin):
    recipe = Recipe.from_dict({"kv_cache": {"recalibrate": kind}})
    assert recipe.kv_cache.margin == margin
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    given = Recipe.from_dict({"kv_cache": {"recalibrate": kind, "margin": 1.5}})
    assert given.kv_cache.margin == 1.5


def test_exact_over_a_cache_of_16_bits_rounds_nothing_in_training():
    cache = {"dtype": "auto", "in_training": False}
    assert Recipe.from_dict({"exact": True, "kv_cache": cache}).exact

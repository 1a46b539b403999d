"""The recipe: defaults, sources, and one clear error for each way to get it wrong."""

from __future__ import annotations

import json
from functools import reduce
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


@pytest.mark.parametrize("suffix", [".yaml", ".json", ""])
def test_load_from_a_file(tmp_path, suffix):
    path = tmp_path / f"recipe{suffix}"
    for data in (FULL, {"fp8rl": FULL}):
        path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
        assert Recipe.load(path) == Recipe.load(str(path)) == Recipe.from_dict(FULL)
    for text in ("{}",) if suffix == ".json" else ("", "fp8rl:\n", "# a comment\n"):
        path.write_text(text)
        assert Recipe.load(path) == Recipe()


def test_from_env(monkeypatch, tmp_path):
    monkeypatch.delenv(RECIPE_ENV, raising=False)
    assert Recipe.from_env() is None
    monkeypatch.setenv(RECIPE_ENV, '{"training": false}')
    assert Recipe.from_env() == Recipe(training=False)
    path = tmp_path / "r.yaml"
    path.write_text("rollout: false")
    monkeypatch.setenv(RECIPE_ENV, str(path))
    assert Recipe.from_env() == Recipe(rollout=False)
    monkeypatch.setenv(RECIPE_ENV, '{"pins": {"layer": [1]}}')
    with pytest.raises(RecipeError, match=rf"unknown key '{RECIPE_ENV}\.pins\.layer'"):
        Recipe.from_env()


def test_all_mistakes_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict({"rolout": True, "pins": {"first": -1}, "kv_cache": {"margin": "much"}})
    for part in ("'recipe.rolout'", "'recipe.pins.first'", "'recipe.kv_cache.margin'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"weights": {"block": [64, 128]}}, "recipe.weights.block.0"),
        ({"pins": {"kinds": ["mlp"]}}, "recipe.pins.kinds.0"),
        ({"kv_cache": {"margin": 0.5}}, "recipe.kv_cache.margin"),
        ({"importance_sampling": {"mode": "drop"}}, "recipe.importance_sampling.mode"),
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
        ({"allow_untested_gpu": True}, "allow_untested_gpu needs training: false, and weights.sc"),
        (
            {"pins": {"layers": [True]}},
            r"^Bad recipe: '.*\.0' must be a valid integer, not True\.$",
        ),
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
                ("importance_sampling", {"rejection": {"hig": 1}}, "'.*rejection.high'"),
            )
        ),
    ],
)
def test_bad_values(data, message):
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.from_dict(data)
    assert isinstance(caught.value, Fp8RLError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.json", b"{", "r.json is not valid JSON: Expecting property name"),
        ("r.json", b'{"a": ' * 20000, "r.json is not valid JSON: it is nested too deeply."),
        (
            "r.yaml",
            b"pins:\n  layers: [1",
            "r.yaml is not valid YAML at line 2, column 13: while parsing a flow sequence, "
            "expected ',' or ']', but got '<stream end>'.",
        ),
        ("r.yaml", b"a: 1\nb: \x01", "r.yaml is not valid YAML at line 2: character #x0001"),
        (
            "r.yaml",
            b"a: !!timestamp 2026-13-45",
            "r.yaml holds a value that YAML cannot read: month must be",
        ),
        ("r.yaml", b"a: &a [*a]", "unknown key"),
        ("r.yaml", b"\xff\xfe\xfa", "r.yaml' cannot be read"),
        ("r.yaml", b"pins: {layrs: [1]}", "r.yaml.pins.layrs'"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(tmp_path / name)
    assert message in str(caught.value)
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
        path.write_text(f"importance_sampling:\n  token_veto: {number}\n")
        assert Recipe.load(path).importance_sampling.token_veto == 1e-4
        path.write_text(f"importance_sampling:\n  token_veto: '{number}'\n")
        with pytest.raises(RecipeError, match="token_veto' must be a valid number, not '"):
            Recipe.load(path)


@pytest.mark.parametrize("form", ["{}", "!!int {}", "!!int '{}'"])
def test_a_number_that_depends_on_the_version_of_yaml_is_refused(tmp_path, form):
    """PyYAML reads 010 as 8 and 1:30 as 90, YAML 1.2 as 10 and as text."""
    path = tmp_path / "r.yaml"
    for number in ("010", "08", "0o10", "1_0", "0b1010", "0x1_0", "1:30", "+01", "1_:30", "+0x10"):
        path.write_text(f"pins:\n  layers: [1, {form.format(number)}]\n")
        with pytest.raises(RecipeError) as caught:
            Recipe.load(path)
        assert f"r.yaml.pins.layers.1' is {number}, which YAML 1.1 and" in str(caught.value)
    for fraction in ("1_0.5", "1:30.5", "1_000", ".5_0", "1_0.5e-3"):
        path.write_text(f"importance_sampling: {{high: {fraction}}}")
        with pytest.raises(RecipeError, match=rf"importance_sampling\.high' is {fraction}, which"):
            Recipe.load(path)
    path.write_text("pins: {layers: [1, 10, -2, +3, 0x10, 0], names: ['010', '1:30']}")
    assert Recipe.load(path).pins == Pins(layers=(1, 10, -2, 3, 16, 0), names=("010", "1:30"))


def test_words_of_yaml_1_1_are_no_booleans_and_dates_are_text(tmp_path):
    path = tmp_path / "r.yaml"
    for word in ("yes", "off", "Off", "y", "2026-11-28", ".inf"):
        path.write_text(f"training: {word}")
        with pytest.raises(RecipeError, match=r"training' must be true or false, not "):
            Recipe.load(path)
    for right in ("true", "True", "TRUE"):
        path.write_text(f"training: {right}")
        assert Recipe.load(path).training is True


def test_numbers_that_are_not_finite_are_refused_by_their_key(tmp_path):
    file = tmp_path / "r.yaml"
    for word in (".inf", "-.inf", ".nan", "1e999"):
        file.write_text(f"kv_cache: {{margin: {word}}}")
        text = word.replace(".nan", "NaN").replace(".inf", "Infinity")
        for source in (file, f'{{"kv_cache": {{"margin": {text}}}}}'):
            with pytest.raises(RecipeError, match=r"kv_cache\.margin' must be a finite number"):
                Recipe.load(source)


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


def test_anchors_and_merges_are_no_twins_and_keys_within_lists_are(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "weights: &w {scale_format: pow2}\nactivations:\n  <<: *w\n  scale_format: fp32\n"
    )
    recipe = Recipe.load(path)
    assert (recipe.weights.scale_format, recipe.activations.scale_format) == ("pow2", "fp32")
    path.write_text("pins:\n  layers:\n  - a: 1\n    a: 2\n")
    with pytest.raises(RecipeError, match=r"pins\.layers\.0\.a' is given twice, in lines 3"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        *((name, f"; write '{RECIPE_ENV}'") for name in ("FP8RL_RECIPES", "fp8rl_recipe")),
        *((name, "") for name in ("FP8RL_RECIPE_FILE", "VLLM_FP8RL_RECIPE")),
        ("FP8_RECIPE", None),  # of Transformer Engine's scripts
        ("FP8RL_DEBUG", None),
    ],
)
def test_a_misspelled_environment_variable(monkeypatch, name, remedy):
    monkeypatch.delenv(RECIPE_ENV, raising=False)
    monkeypatch.setenv(name, "{}")
    if remedy is None:
        assert Recipe.from_env() is None
    else:
        with pytest.raises(RecipeError, match=f"'{name}' is not read by fp8rl{remedy}"):
            Recipe.from_env()
    monkeypatch.setenv(RECIPE_ENV, '{"rollout": false}')
    assert Recipe.from_env() == Recipe(rollout=False)


def test_errors_are_one_short_line(tmp_path):
    file = tmp_path / "r.yaml"
    names = "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdef", "bcdefg", strict=True)
    )
    for text in (
        "? [a, b]\n: 1\n? [a, b]\n: 2",
        f"a: &a [x, x, x]\n{names}pins: {{names: *g}}",
        '{"\\u2028": 1, "\\u2028": 2}',
    ):
        file.write_text(text)
        with pytest.raises(RecipeError) as caught:
            Recipe.load(file)
        assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 10_000
        assert "ScalarNode" not in str(caught.value)
    with pytest.raises(RecipeError, match=r"^Recipe file '[^\n]{1,210}' (does not|cannot)"):
        Recipe.load("x" * 5000)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "a NoneType; give a path"),
        ({"pins": {}}, r"a dict; .*give a mapping to Recipe\.from_dict"),
        ("/nowhere.yaml", r"nowhere\.yaml' does not exist; give a path or a JSON"),
        ("/", "' is a folder; give the path of the recipe file in it"),
        ("{not json", "recipe is not valid JSON"),
    ],
)
def test_what_is_no_source(source, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.load(source)


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


@pytest.mark.parametrize("in_training", [True, False])
def test_exact_over_a_cache_of_16_bits_rounds_nothing_in_training(in_training: bool) -> None:
    cache = {"dtype": "auto", "in_training": in_training}
    assert Recipe.from_dict({"exact": True, "kv_cache": cache}).exact

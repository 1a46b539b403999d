"""The recipe: defaults, sources, and one clear error for each way to get it wrong."""

from __future__ import annotations

import json
import math
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

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
    "kv_cache": {
        "dtype": "auto",
        "recalibrate": "grow",
        "margin": 1.5,
        "in_training": False,
    },
    "rope_dtype": "float32",
    "importance_sampling": {
        "corrector": "is",
        "level": "sequence",
        "mode": "clip",
        "low": 0.5,
        "high": 4.0,
        "self_normalize": True,
        "log_ratio_clamp": 10.0,
        "rejection": {"level": "geometric", "low": 0.9, "high": 1.1},
        "token_veto": 1e-4,
    },
    "exact": False,
    "allow_untested_gpu": True,
}


def test_default_is_the_published_recipe():
    recipe = Recipe()
    assert recipe.rollout and recipe.training
    assert recipe.weights.block == (128, 128)
    assert recipe.activations.group == 128
    assert recipe.weights.scale_format == recipe.activations.scale_format == "fp32"
    assert recipe.pins == Pins()
    assert recipe.kv_cache.dtype == "fp8_e4m3" and recipe.kv_cache.has_scales
    sampling = recipe.importance_sampling
    assert (sampling.level, sampling.mode, sampling.high) == ("token", "truncate", 2.0)
    assert Recipe.from_dict({}) == recipe


def test_round_trip_through_a_plain_dict():
    recipe = Recipe.from_dict(FULL)
    assert recipe.to_dict() == FULL
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert Recipe.from_dict(Recipe().to_dict()) == Recipe()


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json", ""])
def test_load_from_a_file(tmp_path, suffix, wrapped):
    path = tmp_path / f"recipe{suffix}"
    data = {"fp8rl": FULL} if wrapped else FULL
    path.write_text(json.dumps(data) if suffix == ".json" else yaml.safe_dump(data))
    assert Recipe.load(path) == Recipe.load(str(path)) == Recipe.from_dict(FULL)


@pytest.mark.parametrize("text", ["", "fp8rl:\n", "{}", "# only a comment\n"])
def test_an_empty_file_is_the_default(tmp_path, text):
    path = tmp_path / "recipe.yaml"
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


def unknown_key_paths() -> list[tuple[str, ...]]:
    def walk(data: dict, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = [walk(v, (*path, k)) for k, v in data.items() if isinstance(v, dict)]
        return [(*path, "typo"), *(p for paths in inner for p in paths)]

    return walk(FULL, ())


@pytest.mark.parametrize("path", unknown_key_paths(), ids=".".join)
def test_unknown_key_is_named_with_its_full_path(path):
    data = json.loads(json.dumps(FULL))
    section = data
    for key in path[:-1]:
        section = section[key]
    section["typo"] = 1
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(data, where="policy.megatron_cfg.fp8rl")
    assert f"unknown key 'policy.megatron_cfg.fp8rl.{'.'.join(path)}'" in str(caught.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict({"rolout": True, "pins": {"first": -1}, "kv_cache": {"margin": "much"}})
    for part in ("'recipe.rolout'", "'recipe.pins.first'", "'recipe.kv_cache.margin'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"weights": {"block": [64, 128]}}, "recipe.weights.block.0"),
        ({"weights": {"scale_format": "e8m0"}}, "recipe.weights.scale_format"),
        ({"activations": {"group": 64}}, "recipe.activations.group"),
        ({"pins": {"layers": ["first"]}}, "recipe.pins.layers.0"),
        ({"pins": {"last": 1.5}}, "recipe.pins.last"),
        ({"pins": {"kinds": ["mlp"]}}, "recipe.pins.kinds.0"),
        ({"kv_cache": {"dtype": "fp8_e5m2"}}, "recipe.kv_cache.dtype"),
        ({"kv_cache": {"recalibrate": "never"}}, "recipe.kv_cache.recalibrate"),
        ({"kv_cache": {"margin": 0.5}}, "recipe.kv_cache.margin"),
        ({"importance_sampling": {"mode": "drop"}}, "recipe.importance_sampling.mode"),
        ({"importance_sampling": {"high": 0}}, "recipe.importance_sampling.high"),
        ({"importance_sampling": {"mode": "clip"}}, "mode 'clip' needs 'low'"),
        ({"importance_sampling": {"low": 0.5}}, "'low' has no meaning with mode 'truncate'"),
        (
            {"importance_sampling": {"mode": "clip", "low": 3, "high": 2}},
            r"low=3\.0 must be below high=2\.0",
        ),
        ({"importance_sampling": {"rejection": {}}}, "rejection needs 'low' or 'high'"),
        (
            {"importance_sampling": {"rejection": {"low": 2, "high": 1}}},
            r"rejection\.low=2\.0 must be below rejection\.high=1\.0",
        ),
        (
            {"exact": True, "training": False},
            r"training and \(over a cache of 8 bits\) kv_cache\.in_training to be true",
        ),
        ({"exact": True, "kv_cache": {"in_training": False}}, "exact needs rollout, training and"),
        ({"exact": True, "rollout": False, "kv_cache": {"dtype": "auto"}}, "exact needs rollout,"),
        ({"allow_untested_gpu": True}, "allow_untested_gpu needs training: false, and weights.sc"),
        (
            {"pins": {"layers": [True]}},
            r"^Bad recipe: '.*\.0' must be a valid integer, not True\.$",
        ),
        ({"pins": {"layers": [0, 1.0]}}, r"layers\.1' must be a valid integer, not 1\.0\.$"),
        ({"pins": {"names": "o_proj"}}, r"'recipe\.pins\.names' must be a list, not 'o_proj'\.$"),
        ({"kv_cache": {"margin": -math.inf}}, r"kv_cache\.margin' must be a finite number"),
        ([1, 2], "recipe must be a mapping of recipe keys, not list"),
        (None, "recipe must be a mapping of recipe keys, not NoneType"),
        ({1: 2}, "recipe"),
    ],
)
def test_bad_values(data, message):
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.from_dict(data)
    assert isinstance(caught.value, Fp8RLError)
    assert isinstance(caught.value, ValueError)


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
        ("r.yaml", b"a: 1\n---\nb: 2", "r.yaml is not valid YAML at line 2, column 1: expected"),
        ("r.yaml", b"a: 1\nb: \x01", "r.yaml is not valid YAML at line 2: character #x0001"),
        ("r.yaml", b"[" * 1200, "r.yaml is not valid YAML: it is nested too deeply."),
        (
            "r.yaml",
            b"a: !!timestamp 2026-13-45",
            "r.yaml holds a value that YAML cannot read: month must be",
        ),
        ("r.yaml", b"a: &a [*a]", "unknown key"),
        ("r.yaml", b"- 1\n- 2\n", "r.yaml must be a mapping of recipe keys, not list"),
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


def value_at(path: tuple[str, ...]) -> Any:
    value: Any = FULL
    for key in path:
        value = value[key]
    return value


def changed(path: tuple[str, ...], value: Any) -> dict:
    """``FULL`` with one value replaced."""
    data = json.loads(json.dumps(FULL))
    section = data
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    return data


WRONG: dict[type, list[Any]] = {
    bool: [1, 0.0, "true", "off"],
    int: [True, 1.0, "1"],
    float: [True, "1.5"],
    str: [True, 1],
}


@pytest.mark.parametrize("path", leaves(FULL), ids=".".join)
def test_nothing_is_cast(path):
    """Each of these is a value that YAML makes by itself, and that Python would convert."""
    right = value_at(path)
    for wrong in WRONG[type(right[-1] if isinstance(right, list) else right)]:
        given = [*right[:-1], wrong] if isinstance(right, list) else wrong
        with pytest.raises(RecipeError) as caught:
            Recipe.from_dict(changed(path, given))
        assert f"'recipe.{'.'.join(path)}" in str(caught.value), given


@pytest.mark.parametrize(
    "number", ["1e-4", "1E-4", "1.0e-4", "0.0001", ".1e-3", "0.00001e1", "1.e-4", "+.0001"]
)
def test_exponents_need_no_dot_in_yaml(tmp_path, number):
    """YAML 1.1, which PyYAML reads, takes ``1e-4`` for a string."""
    path = tmp_path / "recipe.yaml"
    path.write_text(f"importance_sampling:\n  token_veto: {number}\n")
    assert Recipe.load(path).importance_sampling.token_veto == 1e-4
    path.write_text(f"importance_sampling:\n  token_veto: '{number}'\n")
    with pytest.raises(RecipeError, match="token_veto' must be a valid number, not '"):
        Recipe.load(path)


@pytest.mark.parametrize(
    "number",
    ["010", "08", "0o10", "1_0", "0b1010", "0x1_0", "1:30", "+01", "1_:30", "+0x10"],
)
@pytest.mark.parametrize("form", ["{}", "!!int {}", "!!int '{}'"])
def test_a_number_that_depends_on_the_version_of_yaml_is_refused(tmp_path, number, form):
    """PyYAML reads 010 as 8 and 1:30 as 90, YAML 1.2 as 10 and as text."""
    path = tmp_path / "r.yaml"
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


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Off", "y", "2026-11-28", ".inf"])
def test_words_of_yaml_1_1_are_no_booleans_and_dates_are_text(tmp_path, word):
    path = tmp_path / "r.yaml"
    path.write_text(f"training: {word}")
    with pytest.raises(RecipeError, match=r"training' must be true or false, not "):
        Recipe.load(path)
    for right in ("true", "True", "TRUE"):
        path.write_text(f"training: {right}")
        assert Recipe.load(path).training is True


def test_numbers_that_are_not_finite_are_refused_by_their_key(tmp_path):
    file = tmp_path / "r.yaml"
    numbers = ("NaN", "Infinity", "-Infinity", "1e999")
    texts = [f'{{"kv_cache": {{"margin": {number}}}}}' for number in numbers]
    for word in (".inf", "-.inf", ".nan", "1e999", *texts):
        file.write_text(f"kv_cache: {{margin: {word}}}")
        with pytest.raises(RecipeError, match=r"kv_cache\.margin' must be a finite number"):
            Recipe.load(word if word in texts else file)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("rolout", "'recipe.rollout'"),
        ("pins.layrs", "'recipe.pins.layers'"),
        ("pins.kind", "'recipe.pins.kinds'"),
        ("KV-Cache", "'recipe.kv_cache'"),
        ("kv_cache.recalibration", "'recipe.kv_cache.recalibrate'"),
        ("kv_cache_dtype", "'recipe.kv_cache.dtype'"),
        ("dtype", "'recipe.kv_cache.dtype'"),
        ("scale_format", "'recipe.weights.scale_format' or 'recipe.activations.scale_format'"),
        ("importance_sampling.rejection.hig", "'recipe.importance_sampling.rejection.high'"),
    ],
)
def test_a_misspelled_or_misplaced_key_is_told_what_to_write(path, meant):
    data: Any = 1
    for key in reversed(path.split(".")):
        data = {key: data}
    with pytest.raises(RecipeError) as caught:
        Recipe.from_dict(data)
    assert f"unknown key 'recipe.{path}' (write {meant})" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value", "meant"),
    [
        ("kv_cache", "dtype", "fp8", "'fp8_e4m3'"),
        ("kv_cache", "dtype", "fp8_e5m2", "'fp8_e4m3'"),
        ("kv_cache", "dtype", "FP8_E4M3", "'fp8_e4m3'"),
        ("kv_cache", "dtype", "int8", "'int8_per_token_head'"),
        ("kv_cache", "dtype", "bf16", "'auto'"),
        ("weights", "scale_format", "ue8m0", "'pow2'"),
        ("weights", "scale_format", "float32", "'fp32'"),
        ("importance_sampling", "level", "tokens", "'token'"),
        ("importance_sampling", "mode", "Off", "'off'"),
        ("pins", "kinds", ["down"], "'down_proj'"),
        ("pins", "kinds", ["qkv"], "'qkv_proj' or 'in_proj_qkvz'"),
    ],
)
def test_another_spelling_of_a_value_is_told_the_one_that_is_read(section, key, value, meant):
    with pytest.raises(RecipeError, match=f"{section}.{key}") as caught:
        Recipe.from_dict({section: {key: value}})
    assert str(caught.value).endswith(f"(write {meant}).")
    right = meant.partition(" or ")[0].strip("'")
    Recipe.from_dict({section: {key: [right] if isinstance(value, list) else right}})


@pytest.mark.parametrize("path", [*leaves(FULL), ("pins",), ("importance_sampling",)], ids=".".join)
def test_a_key_twice_is_an_error(tmp_path, path):
    """Both parsers would keep the last one: a pin would be lost without a word."""
    marked = json.dumps(changed(path, "HERE"), indent=1)
    value = json.dumps(value_at(path))
    twice = marked.replace('"HERE"', f'{value},\n"{path[-1]}": {value}')
    dotted = ".".join(path)
    with pytest.raises(RecipeError) as caught:
        Recipe.load(twice)
    assert str(caught.value) == f"'recipe.{dotted}' is given twice; keep one of them."
    line = marked[: marked.index('"HERE"')].count("\n") + 1
    file = tmp_path / "r.yaml"
    file.write_text(twice)  # JSON is YAML
    with pytest.raises(RecipeError) as caught:
        Recipe.load(file)
    assert f"r.yaml.{dotted}' is given twice, in lines {line} and {line + 1}; keep" in str(
        caught.value
    )


def test_a_key_twice_inside_a_list_or_in_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "r.yaml"
    path.write_text("pins:\n  layers:\n  - a: 1\n    a: 2\n")
    with pytest.raises(
        RecipeError, match=r"r\.yaml\.pins\.layers\.0\.a' is given twice, in lines 3"
    ):
        Recipe.load(path)
    monkeypatch.setenv(RECIPE_ENV, '{"pins": {"last": 1}, "pins": {"last": 2}}')
    with pytest.raises(RecipeError, match=rf"'{RECIPE_ENV}\.pins' is given twice"):
        Recipe.from_env()


def test_anchors_and_merges_are_no_twins(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(
        "weights: &w {scale_format: pow2}\nactivations:\n  <<: *w\n  scale_format: fp32\n"
    )
    recipe = Recipe.load(path)
    assert (recipe.weights.scale_format, recipe.activations.scale_format) == ("pow2", "fp32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, f"'{name}' is not read by fp8rl; write '{RECIPE_ENV}'")
            for name in ("FP8RL_RECIPES", "FP8_RL_RECIPE", "fp8rl_recipe", "FP8RL_RECIPIE")
        ),
        *(  # more around our name
            (name, f"'{name}' is not read by fp8rl")
            for name in ("FP8RL_RECIPE_FILE", "VLLM_FP8RL_RECIPE")
        ),
        ("FP8_RECIPE", None),  # of Transformer Engine's scripts
        ("FP8RL_DEBUG", None),
    ],
)
def test_a_misspelled_environment_variable(monkeypatch, name, message):
    monkeypatch.delenv(RECIPE_ENV, raising=False)
    monkeypatch.setenv(name, "{}")
    if message is None:
        assert Recipe.from_env() is None
    else:
        with pytest.raises(RecipeError, match=message):
            Recipe.from_env()
    monkeypatch.setenv(RECIPE_ENV, '{"rollout": false}')
    assert Recipe.from_env() == Recipe(rollout=False)


def test_mappings_that_are_no_dicts():
    section = MappingProxyType({"last": 1})  # as OmegaConf's are
    assert Recipe.from_dict(MappingProxyType({"pins": section})) == Recipe(pins=Pins(last=1))


def test_errors_are_one_short_line(tmp_path):
    file = tmp_path / "r.yaml"
    names = "".join(
        f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
        for old, new in zip("abcdef", "bcdefg", strict=True)
    )
    for text in (
        '"pi\\nns": {}',
        "? [a, b]\n: 1\n? [a, b]\n: 2",
        f"a: &a [x, x, x]\n{names}pins: {{names: *g}}",
        '{"\\u2028": 1, "\\u2028": 2}',
    ):
        file.write_text(text)
        for source in (file, text) if text.startswith("{") else (file,):
            with pytest.raises(RecipeError) as caught:
                Recipe.load(source)
            assert len(str(caught.value).splitlines()) == 1
            assert len(str(caught.value)) < 10_000
            assert "ScalarNode" not in str(caught.value)
    for path in ("pins:\n  last: 1", "x" * 5000):
        with pytest.raises(RecipeError, match=r"^Recipe file '[^\n]{1,210}' (does not|cannot)"):
            Recipe.load(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "a NoneType; give a path"),
        (b"r.yaml", "a bytes; give a path"),
        ({"pins": {}}, r"a dict; .*give a mapping to Recipe\.from_dict"),
        (["r.yaml"], "a list; give a path"),
        ("", "'' does not exist; give a path"),
        ("/nowhere.yaml", r"nowhere\.yaml' does not exist; give a path or a JSON"),
        ("/", "' is a folder; give the path of the recipe file in it"),
        ("{not json", "recipe is not valid JSON"),
        ("pins: {last: 1}" * 300, r"cannot be read: .*File name too long"),
    ],
)
def test_what_is_no_source(source, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.load(source)


pins = st.builds(
    Pins,
    layers=st.lists(st.integers(-9, 9), max_size=4).map(tuple),
    first=st.integers(0, 3),
    last=st.integers(0, 3),
    names=st.lists(st.sampled_from(["a", "b.*", "c"]), max_size=3).map(tuple),
    kinds=st.lists(st.sampled_from(["o_proj", "down_proj"]), max_size=2).map(tuple),
)


@given(a=pins, b=pins)
def test_merged_pins_are_the_union(a, b):
    merged = a.merged(b)
    for key in ("layers", "names", "kinds", "fp8"):
        found = getattr(merged, key)
        assert set(found) == set(getattr(a, key)) | set(getattr(b, key))
        assert len(found) == len(set(found))
    assert merged.first == max(a.first, b.first)
    assert merged.last == max(a.last, b.last)


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

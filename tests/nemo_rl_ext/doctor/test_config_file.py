"""A YAML of NeMo RL as its drivers read it; tests/contract compares with their own loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8rl.errors import Fp8RLError, OptionError, RecipeError, UnsupportedError
from nemo_rl_ext.doctor.config_file import load_config


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Write files by name and read ``x.yaml``."""

    def load(**texts: str) -> dict[str, Any]:
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        return load_config(tmp_path / "x.yaml")

    return load


def test_numbers_of_yaml_1_1_are_refused_in_our_blocks_alone(tmp_path: Path) -> None:
    """Upstream's files have hours as 00:03:35:00."""
    file = tmp_path / "x.yaml"
    theirs = "grpo: {seeds: &all [010], must_save_by: 00:03:35:00}\n"
    ours = theirs + "policy: {megatron_cfg: {fp8rl: {pins: {layers: %s}}}}\n"
    file.write_text(ours % "[10]")
    assert load_config(file)["policy"]["megatron_cfg"]["fp8rl"]["pins"]["layers"] == [10]
    for octal in ("[010]", "*all"):  # an alias brings theirs into ours
        file.write_text(ours % octal)
        with pytest.raises(RecipeError, match=r"megatron_cfg\.fp8rl\.pins\.layers\.0' is 010"):
            load_config(file)


def test_interpolations_compute_as_in_nemo_rl(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", ".")
    text = "sum: ${add:1,2}\nproduct: ${mul:${sum},4}\nratio: ${div:6,4}\nlargest: ${max:1,9}"
    made = load(
        a=text, x="defaults: ${oc.env:FOLDER}/a.yaml\nrate: 1e-5\nlater: ???\nday: 2026-11-23"
    )
    computed = {"sum": 3, "product": 12, "ratio": 1.5, "largest": 9}
    assert made == {**computed, "rate": 1e-5, "later": "???", "day": "2026-11-23"}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a: [", RecipeError, r"x\.yaml' is not valid YAML at line 1"),
        ("a: 1\na: 2", RecipeError, r"x\.yaml'\.a' is given twice"),
        ("- 1", RecipeError, r"x\.yaml' holds a list, not a mapping of config keys; correct it"),
        ("defaults: none.yaml", OptionError, r"none\.yaml' cannot be read \(No such .*x\.yaml"),
        ("defaults: x.yaml", RecipeError, r"x\.yaml' is a parent of itself; correct"),
        ("a: {b: '${none.c}'}", RecipeError, r"cannot be resolved at 'a\.b': Interpolation key"),
        ("a: ${oc.env:NO_SUCH_NAME}", RecipeError, r"variable 'NO_SUCH_NAME' not found"),
        ("a: ${div:1,0}", RecipeError, r"cannot be resolved at 'a': ZeroDivisionError"),
        ("defaults: 3\na: 1", RecipeError, r"'defaults' of .*x\.yaml' is 3"),
    ],
)
def test_what_cannot_be_read(text: str, error: type[Fp8RLError], message: str, load: Any) -> None:
    with pytest.raises(error, match=message) as raised:
        load(x=text)
    assert "\n" not in str(raised.value)
    with pytest.raises(OptionError, match=r"none\.yaml' cannot be read .* path of a YAML"):
        load_config(Path("none.yaml"))


def test_omegaconf_is_asked_for_by_name(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "omegaconf", None)
    with pytest.raises(UnsupportedError, match=r"OmegaConf, .* install omegaconf"):
        load(x="a: 1")

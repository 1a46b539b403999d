"""Which changes of an upstream function matter to a patch, on signatures made for the test."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.patches.upstream import KNOWN, Upstream, compare_source, resolve

MODULE = "nemo_rl_of_a_test.part"
CHECKS = ["imported", "source"]


@pytest.fixture(params=CHECKS)
def compare(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Compare with a function that is imported, and with one whose source is read."""

    def check(expected: str, actual: str, *, replaced: bool = False) -> None:
        upstream = Upstream(MODULE, "train", expected, replaced)
        source = f"def train({actual}): ...\n"
        if request.param == "source":
            (tmp_path / "part.py").write_text(source)
            compare_source(str(tmp_path), upstream)
        else:
            module: Any = ModuleType(MODULE)
            exec(compile(source, "part.py", "exec"), module.__dict__)
            resolve(module, upstream)

    return check


RELIED_ON = "self, data, loss_fn, eval_mode=..., *, timer=..."


@pytest.mark.parametrize(
    "actual",
    [
        "self, data, loss_fn, eval_mode=False, gbs=None, timer=None, added=1",
        "self, data, loss_fn, eval_mode=False, *more, timer=None, **others",
        "self, data: dict, loss_fn=None, eval_mode: bool = False, timer: object = None",
    ],
)
def test_what_does_not_matter_is_accepted(compare: Callable[..., None], actual: str) -> None:
    compare(RELIED_ON, actual)


@pytest.mark.parametrize(
    "actual",
    [
        pytest.param("self, data, loss_fn, eval_mode=False", id="removed"),
        pytest.param("self, loss_fn, data, eval_mode=False, timer=None", id="reordered"),
        pytest.param("self, data, loss_fn, gbs, eval_mode=False, timer=None", id="required"),
        pytest.param("self, data, loss_fn, eval_mode=False, *, gbs, timer=None", id="by name"),
        pytest.param("self, data, loss_fn, eval_mode, timer=None", id="no longer optional"),
        pytest.param("self, data, loss_fn, *, eval_mode=False, timer=None", id="by name alone"),
        pytest.param("self, data, loss_fn, eval_mode=False, **kwargs", id="hidden"),
    ],
)
def test_what_matters_is_refused(compare: Callable[..., None], actual: str) -> None:
    with pytest.raises(UnsupportedError, match=r"takes \(self, ") as error:
        compare(RELIED_ON, actual)
    assert f"does not fit ({RELIED_ON}) of NeMo RL {KNOWN}" in str(error.value)


def test_a_method_in_whose_place_ours_stands_may_get_no_parameters(
    compare: Callable[..., None],
) -> None:
    """Upstream's own callers would pass them, and ours does not take them."""
    compare("self, transport", "self, transport", replaced=True)
    compare("self, transport", "self, transport, partial=False")
    with pytest.raises(UnsupportedError, match=r"takes \(self, transport, partial=\.\.\.\)"):
        compare("self, transport", "self, transport, partial=False", replaced=True)


def test_a_decorated_function_is_compared_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo RL's NVTX decorator hides the parameters of the functions that it wraps."""
    package = "decorated_of_a_test"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    text = """
def named(f):
    return lambda *args, **kwargs: f(*args, **kwargs)

@named
def load_config(path): ...
"""
    (tmp_path / package / "part.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"{package}.part")
    resolve(module, Upstream(module.__name__, "load_config", "path"))
    with pytest.raises(UnsupportedError, match=r"takes \(path\), which does not fit \(config_path"):
        resolve(module, Upstream(module.__name__, "load_config", "config_path"))


def test_what_is_gone_is_told_by_name(tmp_path: Path) -> None:
    (tmp_path / "part.py").write_text("def other(): ...\n")
    upstream = Upstream(MODULE, "Policy.train", "self")
    with pytest.raises(UnsupportedError, match=rf"{MODULE}.Policy.train does not exist; NeMo RL"):
        compare_source(str(tmp_path), upstream)
    with pytest.raises(UnsupportedError, match="does not exist"):
        resolve(ModuleType(MODULE), upstream)
    assert MODULE not in sys.modules


def test_what_a_newer_release_has_instead_need_not_be_there(tmp_path: Path) -> None:
    """Its module may be a package, and its name a key of a class."""
    upstream = Upstream(MODULE, "train", "self", unless=("nemo_rl_of_a_test.config", "Config.key"))
    with pytest.raises(UnsupportedError, match="train does not exist"):
        compare_source(str(tmp_path), upstream)
    file = tmp_path / "config" / "__init__.py"
    file.parent.mkdir()
    file.write_text("class Config(dict):\n    other: int\n")
    with pytest.raises(UnsupportedError, match="train does not exist"):
        compare_source(str(tmp_path), upstream)
    file.write_text("class Config(dict):\n    other: int\n    key: str\n")
    compare_source(str(tmp_path), upstream)

"""Version checks, and what `fp8rl doctor` says about Megatron-Core."""

from __future__ import annotations

import re
from importlib.metadata import version

import pytest
from megatron.core.tensor_parallel import layers

from fp8rl import PluginManager
from fp8rl.errors import UnsupportedError
from megatron_fp8rl import compat, hooks


def test_the_installed_version_has_the_seam():
    compat.check_forward_impl()


def test_a_megatron_built_differently_is_named(monkeypatch):
    monkeypatch.delattr(layers.RowParallelLinear, "_forward_impl")
    monkeypatch.setattr(
        layers, "linear_with_grad_accumulation_and_async_allreduce", lambda input, weight: None
    )
    with pytest.raises(UnsupportedError, match=r"tp_group.*RowParallelLinear\._forward_impl"):
        compat.check_forward_impl()


def test_doctor_finds_megatron():
    plugins = PluginManager(discover=False)
    plugins.register(hooks)
    (adapter,) = plugins.engine_adapters()
    found = adapter.diagnose()
    assert adapter.name == "megatron"
    assert found.installed == version("megatron-core")
    assert found.problems == ()


@pytest.mark.parametrize(
    ("installed", "problem"),
    [("0.9.0", r"0\.9\.0 is untested; install .*0\.16\.1"), (None, r"install fp8rl\[megatron\]")],
)
def test_doctor_names_another_version_and_none(monkeypatch, installed, problem):
    monkeypatch.setattr(hooks, "installed_version", lambda: installed)
    found = hooks.diagnose()
    assert found.installed == installed
    (told,) = found.problems
    assert re.search(problem, told)

"""The plugin manager with real (made-up) distributions on ``sys.path``."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fp8rl import PluginManager, hookimpl
from fp8rl.errors import PinError, PluginError
from fp8rl.gemm import ReferenceBackend
from fp8rl.models.spec import ModelSpec
from fp8rl.recipe import Pins

GOOD = """
from fp8rl import hookimpl
from fp8rl.recipe import Pins

@hookimpl
def register_pins(module_names):
    return Pins(names=("*.0.mlp.down_proj",))
"""
HOOK = "from fp8rl import hookimpl\n@hookimpl\n"


class Backend(ReferenceBackend):
    def __init__(self, name: str) -> None:
        self.name = name


def manager(*plugins: object) -> PluginManager:
    found = PluginManager(discover=False)
    for plugin in plugins:
        found.register(plugin)
    return found


def plugin(**hooks: object) -> SimpleNamespace:
    """A plugin whose hooks return these values."""

    def make(value: object):
        return lambda: value

    return SimpleNamespace(**{name: hookimpl(make(value)) for name, value in hooks.items()})


def pinning(pins: object) -> SimpleNamespace:
    @hookimpl
    def register_pins(module_names):
        return pins

    return SimpleNamespace(register_pins=register_pins)


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("import no_such_module_anywhere", None, "ModuleNotFoundError: No module named"),
        ("def broken(:", None, "SyntaxError"),
        ("", "module_of_dist_of_bad:missing", "AttributeError"),
        (f"{HOOK}def register_pinz(module_names): ...", None, "unknown hook 'register_pinz'"),
        (f"{HOOK}def register_pins(names): ...", None, "PluginValidationError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_beside_one_that_can(install, code, value, reason):
    install(code, name="bad", value=value)
    install(GOOD, name="good")
    with pytest.raises(PluginError) as caught:
        PluginManager()
    message = str(caught.value)
    for part in ("plugin 'bad'", "from dist_of_bad", reason, "FP8RL_BLOCK_PLUGINS=bad"):
        assert part in message

    tolerant = PluginManager(strict=False)
    assert str(tolerant.broken["bad"]) == message
    assert not tolerant.has_plugin("bad")
    policy = tolerant.pin_policy(Pins(last=1), ModelSpec.dense(3).names)
    assert policy.bf16_linears()[0] == "model.layers.0.mlp.down_proj"
    assert len(policy.bf16_linears()) == 1 + 7


def test_blocked_plugins_are_not_even_imported(install, monkeypatch):
    install("raise RuntimeError", name="bad")
    install("raise RuntimeError", name="worse")
    monkeypatch.setenv("FP8RL_BLOCK_PLUGINS", " bad, worse,")
    found = PluginManager()
    assert not {"bad", "worse"} & set(found.entry_points)
    assert found.has_plugin("nemo_rl")


def test_two_distributions_with_one_plugin_name(install):
    install(GOOD, name="same", dist="one")
    install(GOOD, name="same", dist="two")
    with pytest.raises(PluginError, match=r"are named 'same'.*from two; .*from one"):
        PluginManager()


FAST, X = {"register_gemm_backends": [Backend("fast")]}, {"register_is_correctors": {"x": abs}}


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            [{"register_gemm_backends": [Backend("reference")]}],  # as the built-in one
            "Two plugins offer .*GEMM backend named 'reference'",
        ),
        ([FAST, FAST], "Two plugins offer .*GEMM backend named 'fast'"),
        ([X, X], "Two plugins offer .*corrector named 'x'; rename"),
        *(
            ([{f"register_{what}": 3}], f"{what} of an fp8rl plugin .* returned int; it must")
            for what in ("gemm_backends", "is_correctors", "engine_adapters")
        ),
    ],
)
def test_what_hooks_must_not_return(hooks, message):
    (what,) = hooks[0]
    found = manager(*(plugin(**each) for each in hooks))
    with pytest.raises(PluginError, match=message):
        getattr(found, what.removeprefix("register_"))()


@pytest.mark.parametrize("what", ["gemm_backends", "is_correctors", "engine_adapters"])
def test_a_hook_that_fails_is_named(what):
    def fail() -> None:
        raise OSError("no such file")

    failing = SimpleNamespace(**{f"register_{what}": hookimpl(fail)})
    match = f"register_{what} .* failed: OSError: no such file. Repair .*BLOCK"
    with pytest.raises(PluginError, match=match):
        getattr(manager(failing), what)()


def test_a_plugin_cannot_change_the_names_that_pins_are_resolved_for():
    """An emptied list lost every pin of the recipe without a word."""

    @hookimpl
    def register_pins(module_names):
        module_names.clear()

    found = manager(SimpleNamespace(register_pins=register_pins))
    with pytest.raises(PluginError, match=r"register_pins of an fp8rl .* AttributeError: .*clear"):
        found.pin_policy(Pins(last=1), [*ModelSpec.dense(2).names])


def test_pins_of_plugins_are_added():
    names = ModelSpec.dense(4).names
    found = manager(pinning(Pins(first=1)), pinning(Pins(layers=(2,))), pinning(None))
    linears = {n.split(".")[2] for n in found.pin_policy(Pins(last=1), names).bf16_linears()}
    assert linears == {"0", "2", "3"}
    with pytest.raises(PluginError, match="returned dict; it must return Pins or None"):
        manager(pinning({"first": 1})).pin_policy(Pins(), names)
    with pytest.raises(PinError, match="matches nothing"):
        manager(pinning(Pins(layers=(9,)))).pin_policy(Pins(), names)

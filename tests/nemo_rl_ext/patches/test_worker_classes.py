"""The choice of worker classes, on a module shaped like upstream's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fp8rl.errors import UnsupportedError
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches import worker_classes
from nemo_rl_ext.patches.worker_classes import STANDS_FOR
from support.nemo_rl import planned

EXTENSION = "my_package.MyWorker"
KEY = "worker_extension_cls_fqn"


class Policy:
    """Upstream's constructor replaces the resolved class by the argument's."""

    def __init__(
        self,
        cluster: Any,
        config: Any,
        tokenizer: Any,
        worker_extension_cls_fqn: str | None = None,
    ) -> None:
        self.extension = worker_extension_cls_fqn


class VllmGeneration:
    def __init__(self, cluster: Any, config: Any, name_prefix: str = "vllm_policy") -> None:
        self.config = config


def config(
    *, megatron: bool = True, trainer: bool = False, rollouts: bool = False, **more: Any
) -> Any:
    return planned(
        {
            "megatron_cfg": {"enabled": megatron, **({"fp8rl": {}} if trainer else {})},
            "generation": {"vllm_cfg": {"fp8rl": {}} if rollouts else {}},
            **more,
        }
    )


@pytest.fixture
def by_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Both modules in one, of a NeMo RL whose config has the key and whose functions are gone."""
    for file, name in (
        ("models/policy/__init__.py", "PolicyConfig"),
        ("models/generation/vllm/config.py", "VllmConfig"),
    ):
        path = tmp_path / file
        path.parent.mkdir(parents=True)
        path.write_text(f"class {name}(dict):\n    worker_extension_cls_fqn: str | None\n")
    package: Any = ModuleType("nemo_rl")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "nemo_rl", package)
    monkeypatch.setattr(worker_classes, "register", lambda name: STANDS_FOR[name])

    module: Any = ModuleType("nemo_rl.models.policy.lm_policy")
    module.Policy = type("Policy", (), {"__init__": Policy.__init__})
    module.VllmGeneration = type("VllmGeneration", (), {"__init__": VllmGeneration.__init__})
    for name in (module.__name__, "nemo_rl.models.generation.vllm.vllm_generation"):
        module.__name__ = name
        worker_classes.apply(module, PatchFinder())
    return module


@pytest.mark.parametrize("asynchronous", [False, True])
def test_where_the_config_has_the_key_it_names_our_classes(by_key: Any, asynchronous: bool) -> None:
    synchronous, engine, *trainers = STANDS_FOR.values()
    first, second = ({"dtensor_cfg": {"fp8rl": {}, "_v2": v2}} for v2 in (False, True))
    renamed = {"automodel_cfg": {"fp8rl": {}}}
    for trainer, changes in zip(trainers, ({}, first, second, renamed), strict=True):
        given = config(megatron=not changes, trainer=True, rollouts=True, **changes)
        by_key.Policy(None, given, None)
        by_key.Policy(None, given, None)  # such as a second one of a run
        assert given[KEY] == trainer
    generation = {
        "vllm_kwargs": {"quantization": "fp8rl"},
        "vllm_cfg": {"async_engine": asynchronous},
    }
    by_key.VllmGeneration(None, config=generation)
    assert generation[KEY] == (engine if asynchronous else synchronous)
    for plain in (config(), config(megatron=False, rollouts=True)):
        assert by_key.Policy(None, plain, None, worker_extension_cls_fqn=EXTENSION).extension
        assert KEY not in plain
    other = {**generation, "vllm_kwargs": {}, KEY: EXTENSION}
    assert by_key.VllmGeneration(None, other).config[KEY] == EXTENSION


def test_another_class_in_the_key_or_the_argument_is_refused(by_key: Any) -> None:
    """A script may write the key after the driver's config has been checked."""
    given = config(trainer=True, rollouts=True)
    with pytest.raises(UnsupportedError, match="replaces the Megatron worker"):
        by_key.Policy(None, given, None, worker_extension_cls_fqn=EXTENSION)
    with pytest.raises(UnsupportedError, match=rf"^policy\.{KEY}='{EXTENSION}' replaces the Meg"):
        by_key.Policy(None, {**given, KEY: EXTENSION}, None)
    assert KEY not in given
    generation = {"vllm_kwargs": {"quantization": "fp8rl"}, KEY: EXTENSION}
    with pytest.raises(UnsupportedError, match=rf"^policy\.generation\.{KEY}=.* the vLLM worker"):
        by_key.VllmGeneration(None, generation)

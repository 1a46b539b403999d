"""The choice of worker classes, on a module shaped like upstream's.

``tests/contract`` has the real one.
"""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import nemo_rl_ext
from fp8rl.errors import UnsupportedError
from nemo_rl_ext.patch_finder import PatchFinder
from nemo_rl_ext.patches import worker_classes
from nemo_rl_ext.patches.worker_classes import STANDS_FOR, UPSTREAM
from support.nemo_rl import planned
from support.processes import run_code

EXTENSION = "my_package.MyWorker"


def resolve_policy_worker_cls(default_cls: str, config: dict[str, Any]) -> str:
    return default_cls


class Policy:
    """Upstream's constructor replaces the resolved class by the argument's."""

    def __init__(
        self,
        cluster: Any,
        config: Any,
        tokenizer: Any,
        name_prefix: str = "lm_policy",
        workers_per_node: Any = None,
        init_optimizer: bool = True,
        weights_path: Any = None,
        optimizer_path: Any = None,
        init_reference_model: bool = True,
        processor: Any = None,
        worker_extension_cls_fqn: str | None = None,
        skip_weight_load: bool = False,
    ) -> None:
        self.extension = worker_extension_cls_fqn


@pytest.fixture
def policy() -> Any:
    module: Any = ModuleType("nemo_rl.models.policy.lm_policy")
    module.resolve_policy_worker_cls = resolve_policy_worker_cls
    module.Policy = type("Policy", (), {"__init__": Policy.__init__})
    worker_classes.apply(module, PatchFinder())
    return module.Policy


def config(*, megatron: bool = True, trainer: bool = False, rollouts: bool = False) -> Any:
    return planned(
        {
            "megatron_cfg": {"enabled": megatron, **({"fp8rl": {}} if trainer else {})},
            "generation": {"vllm_cfg": {"fp8rl": {}} if rollouts else {}},
        }
    )


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (config(trainer=True, rollouts=True), "policy.megatron_cfg.fp8rl"),
        (config(rollouts=True), "policy.generation.vllm_cfg.fp8rl"),
    ],
)
def test_a_worker_extension_in_the_place_of_our_class_is_refused(
    policy: Any, given: Any, key: str
) -> None:
    """Naively it would train in BF16 without a word."""
    with pytest.raises(UnsupportedError, match=rf"{EXTENSION}.*'{key}' needs; leave the argument"):
        policy(None, given, None, worker_extension_cls_fqn=EXTENSION)
    assert policy(None, given, None).extension is None


@pytest.mark.parametrize("given", [config(), config(megatron=False, rollouts=True)])
def test_a_worker_extension_that_displaces_nothing_of_ours_is_upstreams(
    policy: Any, given: Any
) -> None:
    assert policy(None, given, None, worker_extension_cls_fqn=EXTENSION).extension == EXTENSION


@pytest.mark.parametrize("name", STANDS_FOR.values())
def test_a_worker_without_the_package_does_not_train_in_bf16(name: str) -> None:
    """A worker imports its class by name, as upstream's builder of workers does."""
    module, _, cls = name.rpartition(".")
    done = run_code(
        f"""
        import importlib, sys
        sys.modules["nemo_rl_ext"] = None  # an environment without this distribution
        getattr(importlib.import_module({module!r}), {cls!r})
        """
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError")
    assert "nemo_rl_ext" in last


def test_what_the_trainer_passes_to_upstream_by_name_is_compared() -> None:
    """Else a name that is gone is noticed when the method runs, and not when the driver starts."""
    compared = {
        upstream.name.removeprefix("MegatronPolicyWorkerImpl."): ast.parse(
            f"def f({upstream.parameters}): ..."
        )
        for upstream in UPSTREAM
        if upstream.parameters is not None
    }
    file = Path(nemo_rl_ext.__file__).with_name("workers") / "training.py"
    passed = [
        (call.func.attr, keyword.arg)
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if ast.unparse(call.func.value) == "super()"
        for keyword in call.keywords
        if keyword.arg is not None  # **options are the caller's
    ]
    assert ("get_logprobs", "data") in passed
    for method, name in passed:
        arguments = {n.arg for n in ast.walk(compared[method]) if isinstance(n, ast.arg)}
        assert name in arguments, f"{method}({name}=..)"

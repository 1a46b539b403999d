"""The ledger of patches: the installed vLLM has its targets; another one is refused by name."""

from __future__ import annotations

import copy
import importlib
import pickle
from dataclasses import replace

import pytest

from fp8rl.errors import UnsupportedError

pytest.importorskip("vllm")
from vllm_fp8rl.patches.ledger import ENGINE_CORE, LEDGER, Patch, install
from vllm_fp8rl.quantization.config import Fp8RLConfig


@pytest.mark.parametrize("patch", LEDGER, ids=lambda patch: f"{patch.module}.{patch.target}")
def test_the_installed_vllm_has_every_target(patch: Patch) -> None:
    try:
        importlib.import_module(patch.module)
    except ImportError as error:
        pytest.skip(f"not on this platform: {error}")
    patch.check()
    assert patch.why and patch.how and patch.until


def test_a_changed_target_is_refused_by_name_before_any_patch() -> None:
    first = ENGINE_CORE[0]
    importlib.import_module(first.module)
    for changed, message in (
        (replace(first, target="EngineCore.clear_prefixes"), "EngineCore.clear_prefixes', which"),
        (replace(first, parameters=("level",)), "reset_prefix_cache', whose parameter 'level'"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            install([changed])


def test_a_patch_is_applied_once() -> None:
    importlib.import_module(ENGINE_CORE[0].module)
    install(ENGINE_CORE)
    applied = ENGINE_CORE[0].check()[2]
    install(ENGINE_CORE)
    assert ENGINE_CORE[0].check()[2] is applied
    assert applied.__wrapped__.__name__ == "reset_prefix_cache"  # type: ignore[attr-defined]


def test_a_copied_config_has_a_state_of_its_own() -> None:
    config = Fp8RLConfig({"kv_cache": {"dtype": "auto"}})
    config._state = object()  # type: ignore[assignment]
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other._recipe == config._recipe
        assert other._state is None
        assert other.changes is not config.changes

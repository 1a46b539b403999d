"""What importing the package and its hooks costs, and what they offer."""

from __future__ import annotations

import subprocess
import sys

import pytest

import nemo_rl_ext
from fp8rl import PluginManager
from nemo_rl_ext.grpo.importance_sampling import correct_is


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_the_installed_entry_point_offers_the_corrector() -> None:
    assert PluginManager().is_correctors()["is"] is correct_is


def test_importing_the_package_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, nemo_rl_ext; "
        "print([m for m in ('torch', 'pydantic', 'fp8rl') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_importing_the_hooks_imports_no_engine() -> None:
    code = (
        "import sys, nemo_rl_ext.hooks; "
        "print([m for m in ('vllm', 'megatron', 'nemo_rl', 'ray', 'transformers', "
        "'vllm_fp8rl', 'megatron_fp8rl') if m in sys.modules])"
    )
    assert run(code) == "[]"


def test_every_public_name_resolves() -> None:
    for name in nemo_rl_ext.__all__:
        assert getattr(nemo_rl_ext, name).__module__.startswith("nemo_rl_ext.")
    assert set(nemo_rl_ext.__all__) <= set(dir(nemo_rl_ext))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = nemo_rl_ext.nothing

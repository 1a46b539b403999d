"""vLLM swallows what breaks while a plugin is loaded: who asks for ``fp8rl`` must still be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import broken_installations
from support.broken_installations import CASES
from support.processes import answer, run_forked


@pytest.fixture(scope="module")
def found(checkpoints: dict[str, Path]) -> dict[str, Any]:
    """Of each installation, what vLLM says to each way of asking."""
    # Made-up installations must lie before the real one, which may be a checkout.
    return answer(
        run_forked(Path(broken_installations.__file__), checkpoints["a"].parent, timeout=180)
    )


@pytest.mark.parametrize("case", CASES)
def test_an_engine_that_asks_for_fp8rl_does_not_start(found, case):
    for way, said in found[case].items():
        named = "Unknown quantization method: fp8rl" in said
        # What register itself raises is not swallowed, the first time.
        assert named or (case, way, said) == (
            "register raises",
            "by argument",
            "RuntimeError: broken",
        )


def test_a_plugin_that_only_patches_vllm_would_run_unpatched(found):
    """The naive way: nobody asks by name, so nobody misses what was not loaded."""
    assert set(found["not asked for"].values()) == {"runs with quantization None"}


def test_the_same_questions_to_a_whole_installation(found):
    assert set(found["whole"].values()) == {"runs with quantization fp8rl"}

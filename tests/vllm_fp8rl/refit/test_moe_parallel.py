"""Expert parallel over two ranks (gloo), in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8rl import Recipe
from fp8rl.recipe import KVCache
from support.engine import PROMPTS
from support.gaps import gap
from support.mla import ALL, ON_A_CPU, SHAPES
from support.processes import answer, run_forked
from support.teacher_forced import vllm_logprobs
from support.tiny import (
    make_mla_checkpoint,
    make_moe_checkpoint,
    make_qwen35_checkpoint,
)
from support.towers import TEXT_ONLY
from vllm_fp8rl.compat import require_cpu_router

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("tp_moe.py")
# Whole blocks on each rank: the same codes as on one.
QWEN35 = {"experts": True, "vision": True, "shared_expert_intermediate_size": 256}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints ``a`` and ``b`` of each kind that this environment can run."""
    require_cpu_router()
    root = tmp_path_factory.mktemp("two-ranks")
    for seed, name in enumerate("ab"):
        make_moe_checkpoint(root / "experts" / name, 40 + seed, moe_intermediate_size=192)
        make_mla_checkpoint(root / "latent" / name, 50 + seed, **SHAPES["v3"])
        if find_spec("transformers.models.qwen3_5_moe"):
            make_qwen35_checkpoint(root / "delta" / name, 60 + seed, **QWEN35)
    (root / "halves").symlink_to("experts")
    return root


@pytest.fixture(scope="module")
def two_ranks(root: Path) -> dict[str, dict[str, Any]]:
    """What each kind of engine over two ranks gives."""
    return answer(run_forked(SCRIPT, root, timeout=540))


def found_by(two_ranks: dict[str, dict[str, Any]], kind: str) -> Any:
    assert "failed" not in two_ranks[kind], two_ranks[kind]["failed"]
    return two_ranks[kind]["found"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["experts", "halves"])
def test_two_ranks(moe_engine, root: Path, two_ranks, kind: str) -> None:
    found = found_by(two_ranks, kind)
    assert found["codes"] is True
    assert found["there_and_back"] is True
    assert found["recovered"] is True
    assert found["pointers"] is True
    lacks, refused = found["errors"]
    assert lacks.startswith("RefitError: The refit lacks 1 of the model's tensors: 'model.layers.1")
    assert refused.startswith("RefitError: The weights are half-updated")
    one = moe_engine(root / kind / "b", Recipe(kv_cache=KVCache(dtype="auto"))).greedy(PROMPTS)
    assert alike(one, found["b"]) > 0.6  # all of them, mostly: padding moves blocks of a half


def alike(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of equal tokens."""
    pairs = [pair for row in zip(one, other, strict=True) for pair in zip(*row, strict=True)]
    return sum(x == y for x, y in pairs) / len(pairs)


@pytest.mark.timeout(600)
def test_multi_latent_attention_over_two_ranks(moe_engine, root: Path, two_ranks) -> None:
    """Before and after refits the tokens are those of one rank, but for a flipped code or two."""
    a, b, again = found_by(two_ranks, "latent")
    assert a == again != b
    for name, two in zip("ab", (a, b), strict=True):
        one = moe_engine(root / "latent" / name, ALL, **ON_A_CPU).greedy(PROMPTS)
        assert alike(one, two) > 0.6  # all of them, mostly


@pytest.mark.timeout(600)
def test_gated_delta_nets_over_two_ranks(moe_engine, monkeypatch, root: Path, two_ranks) -> None:
    """As near to one rank as codes that flip allow: ranks sum in another order."""
    pytest.importorskip("transformers.models.qwen3_5_moe", reason="transformers has no Qwen3.5")
    from support.gated_delta_net import compute_in_float32

    a, b, again = (torch.tensor(each) for each in found_by(two_ranks, "delta"))
    assert torch.equal(a, again)
    compute_in_float32(monkeypatch)
    recipe = Recipe(kv_cache=KVCache(dtype="auto"))
    for name, two in zip("ab", (a, b), strict=True):
        one = vllm_logprobs(moe_engine(root / "delta" / name, recipe, **TEXT_ONLY))
        assert gap(one, two).mean < 0.02 * gap(a, b).mean, gap(one, two)

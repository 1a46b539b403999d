"""Two ranks over vLLM's multiprocess executor (gloo), in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from support.cases import names_of
from support.engine import make_checkpoint
from support.gaps import gap
from support.mla import SHAPES
from support.processes import answer, run_forked
from support.tiny import make_mla_checkpoint, make_moe_checkpoint, make_qwen35_checkpoint
from vllm_fp8rl.compat import require_cpu_router

SCRIPT = Path(__file__).with_name("tp_refit.py")
# Whole blocks on each rank: the same codes as on one.
QWEN35 = {"experts": True, "vision": True, "shared_expert_intermediate_size": 256}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each case failed, if it did."""
    root = tmp_path_factory.mktemp("two-ranks")
    # 328 columns of gate and up make 164 a rank: their boundary lies within a block.
    for seed, name in enumerate("ab"):
        make_checkpoint(root / name, 40 + seed, intermediate_size=328)
    return answer(run_forked(SCRIPT, root, timeout=540))


@pytest.mark.parametrize("case", names_of(SCRIPT))
def test_refit_over_two_ranks(failures, case):
    assert not failures[case], failures[case]


@pytest.fixture(scope="module")
def found_by(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each kind of model with experts gives."""
    require_cpu_router()
    root = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate("ab"):
        make_moe_checkpoint(root / "experts" / name, 40 + seed, moe_intermediate_size=192)
        make_mla_checkpoint(root / "latent" / name, 50 + seed, **SHAPES["v3"])
        if find_spec("transformers.models.qwen3_5_moe"):
            make_qwen35_checkpoint(root / "delta" / name, 60 + seed, **QWEN35)
    (root / "halves").symlink_to("experts")
    return answer(run_forked(SCRIPT.with_name("tp_moe.py"), root, timeout=540))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "noise"), [("experts", 0.02), ("halves", 0.5), ("latent", 0.1), ("delta", 0.02)]
)
def test_refits_over_two_ranks_give_the_logprobs_of_one(found_by, kind, noise):
    """As near as codes that flip allow: ranks sum in another order, and halves move blocks."""
    if kind not in found_by:
        pytest.skip("transformers has no Qwen3.5")
    found = found_by[kind]
    assert "failed" not in found, found["failed"]
    a, b, again = (torch.tensor(each) for each in found["logprobs"])
    assert torch.equal(a, again)
    assert found["in place"]
    if kind == "experts":
        assert found["error"].startswith("RefitError: The refit lacks 1 of the model's tensors")
    one = torch.tensor(found["one"])
    assert gap(one, b).mean < noise * gap(a, b).mean, (gap(one, b), gap(a, b))
